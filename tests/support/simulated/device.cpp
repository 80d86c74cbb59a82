// A simulated accelerator for PyTorch: two devices of the type PrivateUse1, which behave as badly as a GPU may.
//
// Every operator and copy is put on the current stream and returns at once; the stream's thread runs it later, after a
// random delay, on the bytes that it then finds. An operator's result is shaped by its meta kernel when it is called,
// and computed by its CPU kernel when the stream comes to it. An operator without a meta kernel, or whose result's
// shape depends on values, waits for the stream.
//
// Device memory is one file that is mapped twice: tensors point to a mapping that nobody may touch (a host's access
// ends in SIGSEGV), kernels and copies work on the other. Freed memory is overwritten with 0xFF (NaN) and reused at
// once, in the order of the stream that it was allocated on; another stream that still uses it needs record_stream.
//
// In turn, as a test may ask, streams have no threads. Each does nothing until the host waits for something on it, and
// then what must come before that, in the thread that waits: all happens as late as it may, and alike in every run. A
// stream may also be ahead: it does what it can at once. In turn there can be a clock, too: copies between host and
// device take time by their size, and streams and the host have the time at which they would be where they are.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int STREAMS = 80;       // of a device; new ones take them in turns, as CUDA's pool does
constexpr int HIGH_PRIORITY = 64; // the last of them, which such streams take in turns
constexpr size_t ARENA = size_t(1) << 30;
constexpr size_t GRAIN = 512;
constexpr int POISON = 0xFF;

std::atomic<uint64_t> seed{0};
std::atomic<int> kernel_delay{50}, copy_delay{500}; // at most, in microseconds
std::atomic<int> copies_until_failure{0};
std::atomic<int> copies_waited_for{0};
std::atomic<int64_t> bytes_to_host{0}, bytes_to_device{0};
std::atomic<bool> in_turn{false}, default_streams_ahead{false};
std::recursive_mutex turn;         // of the thread that does what streams have to do
std::atomic<double> host_time{0};  // in seconds, as all times of the clock
std::atomic<double> link_speed{0}; // bytes a second between host and device; 0: there is no clock

void host_is_at(double time) { host_time = std::max<double>(host_time, time); }

// --- streams and events ------------------------------------------------------------------------------------------

class Queue;

// A place in a stream, which its thread reaches.
class Mark {
  public:
    explicit Mark(Queue *stream = nullptr) : stream_(stream) {}

    void reach(const std::string &failure, double time = 0) {
        std::lock_guard lock(mutex_);
        failure_ = failure;
        reached_ = std::chrono::steady_clock::now();
        time_ = time;
        is_reached_ = true;
        changed_.notify_all();
    }

    void wait(); // for a stream

    // For the host.
    void synchronize() {
        wait();
        host_is_at(time_);
        check();
    }

    // Once it is reached: raise if its stream has failed before it.
    void check() { TORCH_CHECK(failure_.empty(), failure_); }

    bool is_reached() {
        std::lock_guard lock(mutex_);
        return is_reached_;
    }

    // Whether the host finds it reached.
    bool query() {
        if (in_turn && link_speed > 0)
            wait();
        return is_reached() && time_ <= host_time;
    }

    std::chrono::steady_clock::time_point reached() { return reached_; }

    double time() { return time_; }

  private:
    Queue *const stream_; // null: reached by the host
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_reached_ = false;
    std::chrono::steady_clock::time_point reached_;
    double time_ = 0;
    std::string failure_;
};

using MarkPtr = std::shared_ptr<Mark>;

// A stream: its thread runs tasks in order. A task that fails leaves its message for the next that waits.
class Queue {
  public:
    Queue(int device, int number) : device(device), number(number) {
        std::thread([this] { run(); }).detach();
    }

    void put(std::function<void()> task, int longest_delay = 0, double seconds = 0) {
        add({std::move(task), nullptr, longest_delay, seconds, host_time});
    }

    MarkPtr mark() {
        auto mark = std::make_shared<Mark>(this);
        put([this, mark] {
            std::unique_lock lock(mutex_);
            auto failure = failure_;
            lock.unlock();
            mark->reach(failure, time_);
        });
        return mark;
    }

    // A stream that waits for one that has failed fails, too: on a GPU all would.
    void wait_for(MarkPtr mark) {
        add({[this, mark] {
                 mark->wait();
                 time_ = std::max(time_, mark->time());
                 mark->check();
             },
             mark, 0, 0, host_time});
    }

    bool is_idle() { return mark_if_busy() == nullptr; }

    void synchronize() {
        if (auto mark = mark_if_busy())
            mark->wait();
        host_is_at(time_);
        std::lock_guard lock(mutex_);
        auto failure = std::exchange(failure_, "");
        TORCH_CHECK(failure.empty(), failure);
    }

    // Until its thread has nothing in hand: a mark is reached while it still is.
    void rest() {
        std::unique_lock lock(mutex_);
        rests_.wait(lock, [this] { return tasks_.empty() && !is_running_; });
    }

    // Raise if it has failed, and no one was told yet.
    void check() {
        std::lock_guard lock(mutex_);
        TORCH_CHECK(failure_.empty(), failure_);
    }

    // In turn: does what comes next.
    void do_next() {
        std::lock_guard mine(turn);
        std::unique_lock lock(mutex_);
        TORCH_CHECK(!is_running_, "simulated device: streams wait for each other");
        TORCH_CHECK(!tasks_.empty(), "simulated device: waits for what was put on no stream");
        at::AutoDispatchBelowAutograd below;
        do_first(lock);
    }

    // In turn: does what it can without another stream's doing more.
    void do_what_is_ready() {
        std::lock_guard mine(turn);
        while (!is_running_ && !tasks_.empty() && (!tasks_.front().awaited || tasks_.front().awaited->is_reached()))
            do_next();
    }

    void begin_clock() { time_ = 0; }

    const int device, number;

  private:
    struct Task {
        std::function<void()> act;
        MarkPtr awaited; // by a task that waits
        int longest_delay;
        double seconds;
        double asked; // the host's time
    };

    void add(Task task) {
        std::unique_lock<std::recursive_mutex> mine(turn, std::defer_lock);
        if (in_turn)
            mine.lock();
        std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        added_.notify_one();
    }

    MarkPtr mark_if_busy() {
        {
            std::lock_guard lock(mutex_);
            if (tasks_.empty() && !is_running_)
                return nullptr;
        }
        return mark();
    }

    void run() {
        at::AutoDispatchBelowAutograd below;
        std::mt19937_64 random(number + 1000 * device);
        uint64_t seeded = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            added_.wait(lock, [this] { return !tasks_.empty() && !in_turn; });
            if (seeded != seed)
                random.seed((seeded = seed) + number + 1000 * device);
            is_running_ = true;
            if (int longest = tasks_.front().longest_delay; longest && random() % 4 == 0) {
                lock.unlock();
                std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
                lock.lock();
            }
            do_first(lock);
        }
    }

    void do_first(std::unique_lock<std::mutex> &lock) {
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        is_running_ = true;
        lock.unlock();
        time_ = std::max(time_, task.asked) + task.seconds;
        std::string failure;
        try {
            task.act();
        } catch (const std::exception &error) {
            failure = error.what();
        }
        task.act = nullptr;
        lock.lock();
        if (!failure.empty())
            failure_ = failure;
        is_running_ = false;
        rests_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable added_, rests_;
    std::deque<Task> tasks_;
    bool is_running_ = false;
    double time_ = 0;
    std::string failure_;
};

void Mark::wait() {
    if (in_turn) {
        std::lock_guard mine(turn);
        TORCH_CHECK(stream_ || is_reached(), "simulated device: waits for a stream that is held");
        while (!is_reached())
            stream_->do_next();
        return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_reached_; });
}

std::mutex streams_mutex;
Queue *streams[DEVICES][STREAMS];
int streams_made[DEVICES], urgent_streams_made[DEVICES];
thread_local int current_device = 0;
thread_local int current_stream[DEVICES];

void check_device(int device) {
    TORCH_CHECK(0 <= device && device < DEVICES, "simulated device ", device, ": there are ", DEVICES);
}

Queue &queue(int device, int number) {
    check_device(device);
    std::lock_guard lock(streams_mutex);
    auto &found = streams[device][number];
    if (!found)
        found = new Queue(device, number);
    return *found;
}

Queue &queue(const c10::Stream &stream) { return queue(stream.device_index(), int(stream.id())); }

Queue &current_queue(int device) { return queue(device, current_stream[device]); }

c10::Stream stream_of(int device, int number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, c10::DeviceIndex(device)), number);
}

template <typename F> void each_queue(int device, F act) {
    for (int number = 0; number < STREAMS; ++number) {
        std::unique_lock lock(streams_mutex);
        auto *found = streams[device][number];
        lock.unlock();
        if (found)
            act(*found);
    }
}

void synchronize_device(int device) {
    each_queue(device, [](Queue &stream) { stream.synchronize(); });
}

// After each thing that the host asks for.
void let_streams_go_ahead() {
    if (in_turn && default_streams_ahead)
        for (int device = 0; device < DEVICES; ++device)
            queue(device, 0).do_what_is_ready();
}

struct Event {
    MarkPtr mark;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return TYPE; }

    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return c10::Device(TYPE, c10::DeviceIndex(current_device)); }
    void setDevice(c10::Device device) const override {
        check_device(device.index());
        current_device = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    c10::Stream getStream(c10::Device device) const override {
        int index = index_of(device);
        return stream_of(index, current_stream[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
    c10::Stream getNewStream(c10::Device device, int priority) const override {
        int index = index_of(device);
        std::lock_guard lock(streams_mutex);
        constexpr int OTHERS = STREAMS - HIGH_PRIORITY;
        if (priority < 0)
            return stream_of(index, OTHERS + urgent_streams_made[index]++ % HIGH_PRIORITY);
        return stream_of(index, 1 + streams_made[index]++ % (OTHERS - 1));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto before = getStream(stream.device());
        current_stream[stream.device_index()] = int(stream.id());
        return before;
    }
    bool queryStream(const c10::Stream &stream) const override { return queue(stream).is_idle(); }
    void synchronizeStream(const c10::Stream &stream) const override { queue(stream).synchronize(); }
    void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event)
            *event = new Event();
        static_cast<Event *>(*event)->mark = queue(stream).mark();
        let_streams_go_ahead();
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (event)
            queue(stream).wait_for(static_cast<Event *>(event)->mark);
        let_streams_go_ahead();
    }
    bool queryEvent(void *event) const override { return !event || static_cast<Event *>(event)->mark->query(); }
    void synchronizeEvent(void *event) const override {
        if (event)
            static_cast<Event *>(event)->mark->synchronize();
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event *>(event);
    }
    double elapsedTime(void *start, void *end, const c10::DeviceIndex) const override {
        if (link_speed > 0)
            return 1e3 * (static_cast<Event *>(end)->mark->time() - static_cast<Event *>(start)->mark->time());
        auto took = static_cast<Event *>(end)->mark->reached() - static_cast<Event *>(start)->mark->reached();
        return std::chrono::duration<double, std::milli>(took).count();
    }

    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override;

  private:
    static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- device memory -----------------------------------------------------------------------------------------------

// The two mappings of all devices' memory.
struct Mappings {
    Mappings() {
        int file = memfd_create("simulated device", 0);
        TORCH_CHECK(file >= 0 && ftruncate(file, DEVICES * ARENA) == 0, "simulated device: no memory");
        forbidden = map(file, PROT_NONE);
        open = map(file, PROT_READ | PROT_WRITE);
        close(file);
    }
    static char *map(int file, int protection) {
        void *address = mmap(nullptr, DEVICES * ARENA, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(address != MAP_FAILED, "simulated device: cannot be mapped");
        return static_cast<char *>(address);
    }
    char *forbidden, *open;
};

Mappings &mappings() {
    static auto *made = new Mappings();
    return *made;
}

// Where kernels and copies find what a tensor points to.
char *open_address(const void *address) {
    auto &both = mappings();
    return address ? both.open + (static_cast<const char *>(address) - both.forbidden) : nullptr;
}

struct Block {
    char *address;
    size_t size;
    Queue *stream;
    std::set<Queue *> users; // other streams, by record_stream
    std::vector<MarkPtr> ends;
};

using StatType = c10::CachingAllocator::StatType;

class DeviceMemory {
  public:
    explicit DeviceMemory(int device) : device_(device), unused_{{mappings().forbidden + device * ARENA, ARENA}} {}

    Block *allocate(size_t wanted) {
        size_t size = (wanted + GRAIN - 1) / GRAIN * GRAIN;
        auto &stream = current_queue(device_);
        std::unique_lock lock(mutex_);
        take_back();
        auto &cached = cached_[&stream];
        auto found = cached.lower_bound(size);
        Block *block;
        if (found != cached.end() && found->first <= 2 * size) {
            block = found->second;
            cached.erase(found);
        } else {
            block = reserve(size, stream);
            if (!block) {
                lock.unlock();
                synchronize_device(device_);
                lock.lock();
                give_cached_back();
                block = reserve(size, stream);
            }
            if (!block)
                ++stats_.num_ooms;
            TORCH_CHECK_WITH(OutOfMemoryError, block, "simulated device ", device_,
                             ": out of memory. Tried to allocate ", size, " bytes; ", reserved(), " of ", capacity,
                             " are in use");
        }
        live_[block->address] = block;
        change(stats_.allocated_bytes, int64_t(block->size));
        change(stats_.active_bytes, int64_t(block->size));
        change(stats_.requested_bytes, int64_t(wanted));
        change(stats_.allocation, 1);
        return block;
    }

    void free(char *address) {
        std::lock_guard lock(mutex_);
        auto *block = live_.extract(address).mapped();
        change(stats_.allocated_bytes, -int64_t(block->size));
        change(stats_.active_bytes, -int64_t(block->size));
        change(stats_.allocation, -1);
        for (auto *user : block->users)
            block->ends.push_back(user->mark());
        block->users.clear();
        ending_.push_back(block);
        take_back();
    }

    void record(char *address, Queue &stream) {
        std::lock_guard lock(mutex_);
        auto found = live_.find(address);
        if (found != live_.end() && found->second->stream != &stream)
            found->second->users.insert(&stream);
    }

    void empty_cache() {
        synchronize_device(device_);
        std::lock_guard lock(mutex_);
        take_back();
        give_cached_back();
    }

    c10::CachingDeviceAllocator::DeviceStats stats() {
        std::lock_guard lock(mutex_);
        return stats_;
    }

    void reset_stats(bool peaks_alone) {
        std::lock_guard lock(mutex_);
        for (auto *array : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.reserved_bytes,
                            &stats_.requested_bytes, &stats_.allocation})
            for (auto &stat : *array)
                peaks_alone ? stat.reset_peak() : stat.reset_accumulated();
    }

    size_t free_bytes() { return capacity - std::min<size_t>(capacity, reserved()); }

    std::atomic<size_t> capacity{ARENA};

  private:
    static void change(c10::CachingAllocator::StatArray &array, int64_t by) {
        auto &stat = array[size_t(StatType::AGGREGATE)];
        by > 0 ? stat.increase(by) : stat.decrease(-by);
    }

    size_t reserved() { return size_t(stats_.reserved_bytes[size_t(StatType::AGGREGATE)].current); }

    // Freed blocks that no stream uses any more: poisoned, in the order of the stream that allocates them again.
    void take_back() {
        for (auto place = ending_.begin(); place != ending_.end();) {
            auto *block = *place;
            bool is_used = false;
            for (auto &end : block->ends)
                is_used = is_used || !end->is_reached();
            if (is_used) {
                ++place;
                continue;
            }
            block->ends.clear();
            poison(*block);
            auto &cached = cached_[block->stream];
            cached.emplace_hint(cached.lower_bound(block->size), block->size, block); // the first of its size
            place = ending_.erase(place);
        }
    }

    static void poison(const Block &block) {
        block.stream->put([to = open_address(block.address), size = block.size] { std::memset(to, POISON, size); });
    }

    Block *reserve(size_t size, Queue &stream) {
        if (reserved() + size > capacity)
            return nullptr;
        for (auto &[address, length] : unused_) {
            if (length < size)
                continue;
            auto *block = new Block{address, size, &stream, {}, {}};
            size_t left = length - size;
            unused_.erase(block->address);
            if (left)
                unused_[block->address + size] = left;
            change(stats_.reserved_bytes, int64_t(size));
            poison(*block);
            return block;
        }
        return nullptr;
    }

    // Only while the device is idle.
    void give_cached_back() {
        for (auto &[stream, blocks] : cached_) {
            for (auto &[size, block] : blocks) {
                change(stats_.reserved_bytes, -int64_t(size));
                auto place = unused_.emplace(block->address, size).first;
                if (auto next = std::next(place); next != unused_.end() && place->first + size == next->first) {
                    place->second += next->second;
                    unused_.erase(next);
                }
                if (place != unused_.begin())
                    if (auto last = std::prev(place); last->first + last->second == place->first) {
                        last->second += place->second;
                        unused_.erase(place);
                    }
                delete block;
            }
            blocks.clear();
        }
    }

    const int device_;
    std::mutex mutex_;
    std::map<char *, size_t> unused_;
    std::map<char *, Block *> live_;
    std::map<Queue *, std::multimap<size_t, Block *>> cached_;
    std::deque<Block *> ending_;
    c10::CachingDeviceAllocator::DeviceStats stats_;
};

DeviceMemory &memory_of(int device) {
    static auto *all = new std::array<DeviceMemory *, DEVICES>{new DeviceMemory(0), new DeviceMemory(1)};
    check_device(device);
    return *(*all)[device];
}

int device_of(const void *address) {
    auto offset = static_cast<const char *>(address) - mappings().forbidden;
    return 0 <= offset && size_t(offset) < DEVICES * ARENA ? int(size_t(offset) / ARENA) : -1;
}

class Allocator final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t size) override {
        c10::Device device(TYPE, c10::DeviceIndex(current_device));
        if (!size)
            return {nullptr, nullptr, &free, device};
        auto *address = memory_of(current_device).allocate(size)->address;
        return {address, address, &free, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void *to, const void *from, size_t size) const override {
        current_queue(device_of(to)).put([to = open_address(to), from = open_address(from), size] {
            std::memcpy(to, from, size);
        });
    }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        for (int device = 0; device < DEVICES; ++device)
            memory_of(device).empty_cache();
    }
    void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
        if (data.get())
            memory_of(device_of(data.get())).record(static_cast<char *>(data.get()), queue(stream));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        return memory_of(device).stats();
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override { memory_of(device).reset_stats(false); }
    void resetPeakStats(c10::DeviceIndex device) override { memory_of(device).reset_stats(true); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) { // virtual since torch 2.10
        return {memory_of(device).free_bytes(), memory_of(device).capacity};
    }

  private:
    static void free(void *address) {
        if (address)
            memory_of(device_of(address)).free(static_cast<char *>(address));
    }
};

Allocator &allocator() {
    static auto *made = new Allocator();
    return *made;
}

void Guard::recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const {
    allocator().recordStream(data, stream);
}

// --- pinned host memory ------------------------------------------------------------------------------------------

// Host memory that copies read and write late: this allocator's, and ranges that a program has registered.
class PinnedMemory final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t size) override {
        free_ended();
        void *address = size ? std::aligned_alloc(4096, (size + 4095) / 4096 * 4096) : nullptr;
        if (size)
            add(address, size);
        return {address, address, &free, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void *to, const void *from, size_t size) const override { std::memcpy(to, from, size); }

    void add(void *address, size_t size) {
        std::lock_guard lock(mutex_);
        ranges_[static_cast<const char *>(address)] = {size, {}};
    }

    bool remove(void *address) {
        std::lock_guard lock(mutex_);
        return ranges_.erase(static_cast<const char *>(address)) == 1;
    }

    bool contains(const void *address) {
        std::lock_guard lock(mutex_);
        return range_of(address) != nullptr;
    }

    // The memory is in use until the mark; torch's own is not freed before.
    void used(const void *address, MarkPtr until) {
        std::lock_guard lock(mutex_);
        if (auto *range = range_of(address))
            range->uses.assign(1, std::move(until));
    }

  private:
    struct Range {
        size_t size;
        std::vector<MarkPtr> uses;
    };

    Range *range_of(const void *address) {
        auto after = ranges_.upper_bound(static_cast<const char *>(address));
        if (after == ranges_.begin())
            return nullptr;
        auto &[start, range] = *std::prev(after);
        return static_cast<const char *>(address) < start + range.size ? &range : nullptr;
    }

    static void free(void *address);
    void free_ended();

    std::mutex mutex_;
    std::map<const char *, Range> ranges_;
    std::deque<std::pair<void *, std::vector<MarkPtr>>> ending_;
};

PinnedMemory &pinned_memory() {
    static auto *made = new PinnedMemory();
    return *made;
}

void PinnedMemory::free(void *address) {
    if (!address)
        return;
    auto &self = pinned_memory();
    {
        std::lock_guard lock(self.mutex_);
        self.ending_.emplace_back(address, self.ranges_.extract(static_cast<const char *>(address)).mapped().uses);
    }
    self.free_ended();
}

void PinnedMemory::free_ended() {
    std::lock_guard lock(mutex_);
    for (auto place = ending_.begin(); place != ending_.end();) {
        bool is_used = false;
        for (auto &mark : place->second)
            is_used = is_used || !mark->is_reached();
        if (is_used) {
            ++place;
            continue;
        }
        std::free(place->first);
        place = ending_.erase(place);
    }
}

// --- random numbers ----------------------------------------------------------------------------------------------

// As CUDA's: a seed, and an offset that each call moves on when it is made, whenever it runs.
class Generator final : public c10::GeneratorImpl {
  public:
    explicit Generator(int device)
        : GeneratorImpl(c10::Device(TYPE, c10::DeviceIndex(device)),
                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

    void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
    void set_offset(uint64_t offset) override { offset_ = offset; }
    uint64_t get_offset() const override { return offset_; }
    uint64_t current_seed() const override { return seed_; }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return seed_;
    }
    void set_state(const c10::TensorImpl &state) override {
        TORCH_CHECK(state.numel() == 16, "simulated device: the state of its generator has 16 bytes");
        auto *data = static_cast<const char *>(state.data());
        std::memcpy(&seed_, data, 8);
        std::memcpy(&offset_, data + 8, 8);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        at::Tensor state(at::detail::empty_cpu({16}, at::kByte));
        std::memcpy(state.mutable_data_ptr(), &seed_, 8);
        std::memcpy(static_cast<char *>(state.mutable_data_ptr()) + 8, &offset_, 8);
        return state.getIntrusivePtr();
    }

    // The generator for one call.
    at::Generator next() {
        std::lock_guard lock(mutex_);
        std::seed_seq numbers{seed_, seed_ >> 32, ++offset_};
        std::array<uint32_t, 2> words;
        numbers.generate(words.begin(), words.end());
        return at::detail::createCPUGenerator(uint64_t(words[0]) << 32 | words[1]);
    }

  private:
    Generator *clone_impl() const override {
        auto *other = new Generator(device().index());
        other->seed_ = seed_, other->offset_ = offset_;
        return other;
    }

    uint64_t seed_ = c10::default_rng_seed_val;
    uint64_t offset_ = 0;
};

at::Generator &default_generator(int device) {
    static auto *all =
        new std::array<at::Generator, DEVICES>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    device = device < 0 ? current_device : device;
    check_device(device);
    return (*all)[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        check_device(device);
        current_device = device;
    }
    c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        auto before = getCurrentDevice();
        setCurrentDevice(device);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device : device);
    }
    c10::Device getDeviceFromPtr(void *data) const override {
        return c10::Device(TYPE, c10::DeviceIndex(device_of(data)));
    }
    bool isPinnedPtr(const void *data) const override { return pinned_memory().contains(data); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const override {
        c10::DeviceGuard guard(storage.device());
        auto data = allocator().allocate(size);
        if (size_t kept = std::min(size, storage.nbytes()))
            allocator().copy_data(data.get(), storage.data(), kept);
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
        storage.unsafeGetStorageImpl()->set_nbytes(size);
    }
};

// --- tensors -----------------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, c10::Device device) {
    c10::DeviceGuard guard(device);
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::Tensor(at::detail::empty_strided_generic(size, stride, &allocator(), keys, dtype));
}

// A Python number has no say in a result's type. A copy of its tensor would: 0.1 as a double.
at::Tensor of_a_number_as(const at::Tensor &original, at::Tensor copy) {
    if (original.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
}

// The same tensor as kernels see it: host memory that is nobody's.
at::Tensor opened(const at::Tensor &tensor) {
    c10::InferenceMode off(false); // the stream's thread has its own
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
    auto *address = open_address(tensor.numel() ? tensor.const_data_ptr() : nullptr);
    return of_a_number_as(tensor, at::from_blob(address, tensor.sizes(), tensor.strides(), options));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(device);
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(), keys,
                                                c10::dtype_or_default(dtype), format));
}

at::Tensor empty_with_strides(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    auto place = device.value_or(c10::Device(TYPE));
    return empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype),
                         place.has_index() ? place : c10::Device(TYPE, c10::DeviceIndex(current_device)));
}

void reshape(const at::Tensor &tensor, at::IntArrayRef size, at::IntArrayRef stride) {
    auto *impl = tensor.unsafeGetTensorImpl();
    size_t bytes = at::detail::computeStorageNbytes(size, stride, impl->itemsize(), size_t(impl->storage_offset()));
    if (bytes > tensor.storage().nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
    impl->set_sizes_and_strides(size, stride);
}

const at::Tensor &resize_(const at::Tensor &self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto like = at::detail::empty_meta(C10_AS_INTARRAYREF_SLOW(size), self.scalar_type(), format);
    if (like.sizes() != self.sizes() || format)
        reshape(self, like.sizes(), like.strides());
    return self;
}

at::Tensor &set_storage(at::Tensor &self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
    if (strides.empty())
        strides = at::detail::empty_meta(sizes, self.scalar_type()).strides().vec();
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
    self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
    reshape(self, sizes, strides);
    return self;
}

at::Tensor &set_whole_storage(at::Tensor &self, at::Storage source) {
    int64_t numel = int64_t(source.nbytes()) / int64_t(self.itemsize());
    return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(std::vector<c10::SymInt>{numel}), {});
}

at::Tensor view(const at::Tensor &self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
    auto place = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             place);
}

at::Tensor reshape_alias(const at::Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// --- copies ------------------------------------------------------------------------------------------------------

// The bytes of dense tensors of one type and order, when the stream comes to it.
void copy_bytes(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
    auto &stream = current_queue(is_ours(from) ? from.get_device() : to.get_device());
    auto &other = is_ours(from) && is_ours(to) ? current_queue(to.get_device()) : stream;
    if (&other != &stream)
        stream.wait_for(other.mark());
    const char *source =
        is_ours(from) ? open_address(from.const_data_ptr()) : static_cast<const char *>(from.const_data_ptr());
    char *target = is_ours(to) ? open_address(to.const_data_ptr()) : static_cast<char *>(to.mutable_data_ptr());
    bool fails = copies_until_failure > 0 && --copies_until_failure == 0;
    auto act = [source, target, size = from.nbytes(), fails] {
        TORCH_CHECK(!fails, "simulated device: the copy failed, as asked");
        std::memcpy(target, source, size);
    };
    stream.put(act, copy_delay, link_speed > 0 ? double(from.nbytes()) / link_speed : 0);
    if (&other != &stream)
        other.wait_for(stream.mark());
    if (is_ours(from) && is_ours(to))
        return;
    (is_ours(from) ? bytes_to_host : bytes_to_device) += from.nbytes();
    auto *host = is_ours(from) ? static_cast<const char *>(target) : source;
    if (non_blocking && pinned_memory().contains(host)) {
        pinned_memory().used(host, stream.mark());
    } else {
        ++copies_waited_for;
        stream.synchronize();
    }
}

bool is_dense_alike(const at::Tensor &from, const at::Tensor &to) {
    return from.sizes() == to.sizes() && from.strides() == to.strides() && from.scalar_type() == to.scalar_type() &&
           from.is_non_overlapping_and_dense();
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &to, bool non_blocking) {
    if (to.numel() == 0)
        return to;
    if (self.is_neg())
        return copy_from(at::_neg_view(self).neg(), to, non_blocking);
    if (is_ours(self) && is_ours(to) && self.device() == to.device()) {
        current_queue(self.get_device()).put([from = opened(self), to = opened(to)] { to.copy_(from); }, kernel_delay);
    } else if (is_dense_alike(self, to)) {
        copy_bytes(self, to, non_blocking);
    } else { // cast and ordered where it is, then moved, then ordered there
        auto source = self.to(to.scalar_type()).expand(to.sizes()).contiguous();
        if (to.is_contiguous()) {
            copy_bytes(source, to, false);
        } else {
            auto moved = is_ours(to) ? empty_strided(source.sizes(), source.strides(), to.scalar_type(), to.device())
                                     : at::Tensor(at::detail::empty_cpu(source.sizes(), to.scalar_type()));
            copy_bytes(source, moved, false);
            to.copy_(moved);
        }
    }
    let_streams_go_ahead();
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

// --- operators ---------------------------------------------------------------------------------------------------

template <typename F> c10::IValue each_tensor(const c10::IValue &value, F act) {
    if (value.isTensor())
        return value.toTensor().defined() ? c10::IValue(act(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector())
            list.push_back(act(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector())
            list.push_back(tensor && tensor->defined() ? std::optional(act(*tensor)) : tensor);
        return list;
    }
    return value;
}

at::Tensor meta_of(const at::Tensor &tensor) {
    if (tensor.is_cpu() && tensor.dim() == 0)
        return tensor; // meta kernels in Python take its value
    at::Tensor meta(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    return of_a_number_as(tensor, meta);
}

bool returns_tensors(const c10::FunctionSchema &schema) {
    for (const auto &result : schema.returns())
        if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
            !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
            return false;
    return true;
}

// The operator that the CPU has in the place of one that backends bring.
c10::OperatorHandle counterpart(const c10::OperatorHandle &op, torch::jit::Stack &arguments) {
    auto &all = c10::Dispatcher::singleton();
    const auto &name = op.schema().name();
    if (name == "aten::convolution_overrideable")
        return all.findSchemaOrThrow("aten::convolution", "");
    if (name == "aten::convolution_backward_overrideable") {
        c10::IValue bias_sizes(std::vector<int64_t>{arguments[0].toTensor().size(1)});
        arguments.insert(arguments.begin() + 3, bias_sizes);
        return all.findSchemaOrThrow("aten::convolution_backward", "");
    }
    return op;
}

// The results' shapes; nothing if no meta kernel tells them.
std::optional<torch::jit::Stack> shapes(const c10::OperatorHandle &op, const torch::jit::Stack &arguments) {
    torch::jit::Stack stack;
    for (const auto &value : arguments)
        stack.push_back(value.isDevice()      ? c10::IValue(c10::Device(c10::DeviceType::Meta))
                        : value.isGenerator() ? c10::IValue()
                                              : each_tensor(value, meta_of));
    try {
        counterpart(op, stack).redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception &) {
        return std::nullopt; // values decide, there is no meta kernel, or the call is wrong, which the CPU kernel says
    }
    const auto &name = op.schema().name();
    if (name == "aten::native_layer_norm" || name == "aten::native_group_norm" ||
        name == "aten::native_batch_norm") { // meta's statistics are CUDA's, in fp32
        const auto input = arguments[0].toTensor().scalar_type();
        const auto &weight = arguments[name == "aten::native_layer_norm" ? 2 : 1];
        const bool is_mixed =
            weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != input;
        for (size_t i = 1; i < 3 && !is_mixed; ++i) {
            auto meta = stack[i].toTensor();
            stack[i] = at::Tensor(at::detail::empty_strided_meta(meta.sizes(), meta.strides(), input));
        }
    }
    return stack;
}

std::optional<size_t> argument_of_result(const c10::FunctionSchema &schema, const c10::Argument &result) {
    if (!result.alias_info() || !result.alias_info()->isWrite())
        return std::nullopt;
    for (size_t i = 0; i < schema.arguments().size(); ++i)
        if (schema.arguments()[i].alias_info() && *schema.arguments()[i].alias_info() == *result.alias_info())
            return i;
    return std::nullopt;
}

c10::Device device_of(const c10::OperatorHandle &op, const torch::jit::Stack &arguments) {
    std::optional<c10::Device> found;
    for (const auto &value : arguments) {
        if (value.isDevice())
            found = value.toDevice();
        each_tensor(value, [&](const at::Tensor &tensor) {
            if (is_ours(tensor)) {
                TORCH_CHECK(!found || *found == tensor.device(), op.schema().name(), ": tensors on ", *found, " and ",
                            tensor.device());
                found = tensor.device();
            } else {
                bool may_be_elsewhere = tensor.dim() == 0 || op.schema().name().find("index") != std::string::npos;
                TORCH_CHECK(may_be_elsewhere, op.schema().name(), ": a tensor on ", tensor.device(),
                            ", expected all of them on one simulated device");
            }
            return tensor;
        });
    }
    auto device = found.value_or(c10::Device(TYPE));
    return device.has_index() ? device : c10::Device(TYPE, c10::DeviceIndex(current_device));
}

void any_operator(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    at::AutoDispatchBelowAutograd below;
    const auto &schema = op.schema();
    const size_t n_arguments = schema.arguments().size(), n_results = schema.returns().size();
    torch::jit::Stack arguments(stack->end() - int64_t(n_arguments), stack->end());
    const auto device = device_of(op, arguments);
    c10::DeviceGuard guard(device);
    auto &stream = current_queue(device.index());

    auto shaped = returns_tensors(schema) ? shapes(op, arguments) : std::nullopt;
    if (!shaped || shaped->size() != n_results) {
        stream.synchronize();
        at::native::cpu_fallback(op, stack);
        return;
    }

    torch::jit::Stack results;
    std::vector<c10::IValue> targets(n_results); // of results that are new tensors
    for (size_t i = 0; i < n_results; ++i) {
        if (auto argument = argument_of_result(schema, schema.returns()[i])) {
            const auto &given = arguments[*argument];
            if (given.isTensor() && (*shaped)[i].isTensor() &&
                given.toTensor().sizes() != (*shaped)[i].toTensor().sizes())
                reshape(given.toTensor(), (*shaped)[i].toTensor().sizes(), (*shaped)[i].toTensor().strides());
            results.push_back(given);
            continue;
        }
        results.push_back(each_tensor((*shaped)[i], [&](const at::Tensor &meta) {
            return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), device);
        }));
        targets[i] = each_tensor(results.back(), opened);
    }

    torch::jit::Stack inputs;
    for (size_t i = 0; i < n_arguments; ++i) {
        const auto &value = arguments[i];
        if (value.isDevice())
            inputs.emplace_back(c10::Device(c10::DeviceType::CPU));
        else if (schema.arguments()[i].name() == "generator")
            inputs.emplace_back((value.isGenerator() ? value.toGenerator() : default_generator(device.index()))
                                    .get<Generator>()
                                    ->next());
        else
            inputs.push_back(each_tensor(value, [](const at::Tensor &tensor) {
                return is_ours(tensor) ? opened(tensor) : of_a_number_as(tensor, tensor.clone());
            }));
    }
    auto kernel = counterpart(op, inputs);
    auto act = [kernel, inputs = std::move(inputs), targets = std::move(targets)]() mutable {
        kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inputs);
        for (size_t i = 0; i < targets.size(); ++i) {
            if (targets[i].isTensor()) {
                const auto target = targets[i].toTensor(), made = inputs[i].toTensor();
                if (target.defined() && made.defined() && made.numel() >= target.numel()) // it may have been left out
                    target.copy_(made);
            } else if (targets[i].isTensorList()) {
                auto made = inputs[i].toTensorVector();
                auto wanted = targets[i].toTensorVector();
                for (size_t k = 0; k < wanted.size(); ++k)
                    wanted[k].copy_(made[k]);
            }
        }
    };
    stream.put(std::move(act), kernel_delay);
    let_streams_go_ahead();
    stack->erase(stack->end() - int64_t(n_arguments), stack->end());
    stack->insert(stack->end(), results.begin(), results.end());
}

// On the CPU it takes the host's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor &input, double p, std::optional<bool> train) {
    if (!train.value_or(true))
        return {input.clone(), at::Tensor(at::ones_like(input, input.options().dtype(at::kBool)))};
    auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void record_stream(at::Tensor &self, c10::Stream stream) {
    allocator().recordStream(self.storage().data_ptr(), stream);
}

} // namespace

// `tensor.data = other` between CPU and device, which torch allows only for the backends that it knows.
TORCH_LIBRARY(simulated, library) {
    library.def("set_data(Tensor tensor, Tensor other) -> ()", [](const at::Tensor &tensor, const at::Tensor &other) {
        tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
    });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_with_strides);
    library.impl("resize_", &resize_);
    library.impl("set_.source_Storage", &set_whole_storage);
    library.impl("set_.source_Storage_storage_offset", &set_storage);
    library.impl("set_.source_Tensor", &at::native::set_tensor_);
    library.impl("view", &view);
    library.impl("as_strided", &as_strided);
    library.impl("_reshape_alias", &reshape_alias);
    library.impl("unfold", &at::native::unfold);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("native_dropout", &native_dropout);
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
    library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
    library.impl("record_stream", &record_stream);
    // The CPU's own kernels, not those that are made of other operators: with the host's bits.
    for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findOp(name);
        auto has = [&op](c10::DispatchKey key) { return op && op->hasKernelForDispatchKey(key); };
        if (name.name.rfind("aten::", 0) == 0 && has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::PrivateUse1) &&
            (has(c10::DispatchKey::CompositeExplicitAutograd) || has(c10::DispatchKey::CompositeImplicitAutograd)))
            library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operator>());
    }
}

// Torch would resolve a negative view by a copy of it.
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// --- what tests ask of it ----------------------------------------------------------------------------------------

extern "C" {
// Makes it the process's accelerator. Without the last line torch takes no memory for pinned.
void simulated_start() {
    c10::SetAllocator(TYPE, &allocator(), 1);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    at::globalContext().lazyInitDevice(TYPE);
}

void simulated_delays(uint64_t new_seed, int kernel, int copy) {
    seed = new_seed, kernel_delay = kernel, copy_delay = copy;
}

// Streams without threads, when they have done all they had to; ahead: the devices' default streams do what they can
// at once. With a link of so many bytes a second there is a clock, which begins at zero.
void simulated_in_turn(bool wanted, bool ahead, double bytes_per_second) {
    for (int device = 0; device < DEVICES; ++device)
        synchronize_device(device);
    if (!in_turn)
        for (int device = 0; device < DEVICES; ++device)
            each_queue(device, [](Queue &stream) { stream.rest(); });
    std::lock_guard mine(turn);
    in_turn = wanted, default_streams_ahead = ahead, link_speed = bytes_per_second;
    host_time = 0;
    for (int device = 0; device < DEVICES; ++device)
        each_queue(device, [](Queue &stream) { stream.begin_clock(); });
}

// The stream has something to do for so long.
void simulated_keep_busy(int device, int stream, double seconds) {
    queue(device, stream).put([] {}, 0, seconds);
}

// The function is called, in the stream's order, unless that has failed; where it returns false, the stream fails.
void simulated_call(int device, int stream, bool (*act)(size_t), size_t argument) {
    auto &queue_ = queue(device, stream);
    queue_.put([&queue_, act, argument] {
        queue_.check();
        TORCH_CHECK(act(argument), "simulated device: what the stream called has failed");
    });
}

// The bytes from the addresses that tensors have to those where kernels find the same memory.
int64_t simulated_open_offset() { return mappings().open - mappings().forbidden; }

// Copies between host and device for which the host has waited: blocking ones, and of memory that is not pinned.
int simulated_copies_waited_for() { return copies_waited_for; }

// Bytes of all copies from the devices to the host so far, and of those the other way.
int64_t simulated_bytes_to_host() { return bytes_to_host; }

int64_t simulated_bytes_to_device() { return bytes_to_device; }

double simulated_time() { return host_time; }

void simulated_set_time(double seconds) { host_time = seconds; }

void simulated_capacity(int device, size_t size) { memory_of(device).capacity = std::min(size, ARENA); }

// The n-th copy from now between host and device, or between devices, fails; 0: none.
void simulated_fail_copy(int n) { copies_until_failure = n; }

// What is put on the stream from now on waits until the returned handle is released.
void *simulated_hold(int device, int stream) {
    auto *gate = new MarkPtr(std::make_shared<Mark>());
    queue(device, stream).put([gate = *gate] { gate->wait(); });
    return gate;
}

void simulated_release(void *handle) {
    auto *gate = static_cast<MarkPtr *>(handle);
    (*gate)->reach("");
    delete gate;
}

// Of the device's own generator.
void simulated_random_state(int device, void *state) {
    std::memcpy(state, default_generator(device).get_state().const_data_ptr(), 16);
}

void simulated_set_random_state(int device, void *state) {
    default_generator(device).set_state(at::from_blob(state, {16}, at::kByte));
}

void simulated_register(void *address, size_t size) { pinned_memory().add(address, size); }

int simulated_unregister(void *address) { return pinned_memory().remove(address) ? 0 : 1; }
}

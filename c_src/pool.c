/* The thread pool: workers are made when first needed, kept, and shared by all calls of the process.
 *
 * A job is a row of items, cut into one contiguous range for each thread. A thread that has finished its own range
 * takes items from others. The static cut keeps memory near the thread that touched it first; taking evens out
 * differences in speed. One job runs at a time, and other callers wait. A fork waits for the running job; the child
 * starts without workers and makes its own, which are bound to nothing.
 *
 * Workers may be bound to a set of processors (Linux). A caller is never bound: it belongs to someone else. If it may
 * run on other processors than the workers, it takes no part in jobs but waits for them, so that memory is touched and
 * updated on those processors alone. A job of a single item is the caller's in any case.
 */
#define _GNU_SOURCE
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#include "offload_core.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned int control_word;
/* Round to nearest, subnormals kept, every exception masked. */
static control_word set_ieee(void) {
    control_word before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
}
static void restore(control_word before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
typedef uint64_t control_word;
static control_word set_ieee(void) {
    control_word before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return before;
}
static void restore(control_word before) { __asm__ volatile("msr fpcr, %0" ::"r"(before)); }
#else
#error "offload-core supports x86-64 and AArch64"
#endif

enum { MAX_THREADS = 256 };

typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t end;
} range;

static struct {
    pthread_mutex_t submit; /* held during a job */
    pthread_mutex_t lock;   /* guards the fields below */
    pthread_cond_t wake, done;
    int workers;
    uint64_t generation;
    int unfinished;
    oc_task *task;
    void *context;
    int threads;
    int caller; /* 1 if the caller is one of the threads, else 0 */
    pthread_t ids[MAX_THREADS];
#if defined(__linux__)
    cpu_set_t cpus;    /* the workers' processors, if they are bound */
    _Atomic int bound; /* read without the lock, too */
#endif
} pool = {.submit = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static range ranges[MAX_THREADS];

static void run_items(oc_task *task, void *context, int self, int threads) {
    control_word before = set_ieee();
    for (int i = 0; i < threads; i++) {
        range *r = &ranges[(self + i) % threads];
        int64_t item;
        while ((item = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->end)
            task(context, item);
    }
    restore(before);
}

static void *worker(void *argument) {
    int number = (int)(intptr_t)argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.generation == seen || number + pool.caller >= pool.threads) {
            seen = pool.generation;
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = pool.generation;
        oc_task *task = pool.task;
        void *context = pool.context;
        int self = number + pool.caller, threads = pool.threads;
        pthread_mutex_unlock(&pool.lock);
        run_items(task, context, self, threads);
        pthread_mutex_lock(&pool.lock);
        if (--pool.unfinished == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void before_fork(void) {
    pthread_mutex_lock(&pool.submit);
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.submit);
}

static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.submit, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = 0;
    pool.threads = 0;
#if defined(__linux__)
    pool.bound = 0;
#endif
}

static pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;
static void register_fork_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

#if defined(__linux__)
/* Call with the lock held. The system refuses if none of the processors is online or allowed: the worker then stays
 * where it may run. */
static void bind_worker(int number) {
    if (pool.bound)
        pthread_setaffinity_np(pool.ids[number], sizeof pool.cpus, &pool.cpus);
}

/* True if the workers are bound, and this thread may run on other processors than theirs. */
static int caller_is_elsewhere(void) {
    cpu_set_t own, common;
    if (!pool.bound || pthread_getaffinity_np(pthread_self(), sizeof own, &own))
        return 0;
    pthread_mutex_lock(&pool.lock);
    CPU_AND(&common, &own, &pool.cpus);
    pthread_mutex_unlock(&pool.lock);
    return !CPU_EQUAL(&common, &own);
}

int oc_bind_workers(const int32_t *cpus, int64_t n_cpus) {
    cpu_set_t set;
    if (!cpus || n_cpus <= 0)
        return OC_EARGUMENT;
    CPU_ZERO(&set);
    for (int64_t i = 0; i < n_cpus; i++) {
        if (cpus[i] < 0)
            return OC_EARGUMENT;
        if (cpus[i] < CPU_SETSIZE)
            CPU_SET(cpus[i], &set);
    }
    if (!CPU_COUNT(&set))
        return 0;
    pthread_once(&fork_handlers, register_fork_handlers);
    pthread_mutex_lock(&pool.lock);
    pool.cpus = set;
    pool.bound = 1;
    for (int i = 0; i < pool.workers; i++)
        bind_worker(i);
    pthread_mutex_unlock(&pool.lock);
    return 0;
}
#else
static void bind_worker(int number) { (void)number; }
static int caller_is_elsewhere(void) { return 0; }
int oc_bind_workers(const int32_t *cpus, int64_t n_cpus) { return !cpus || n_cpus <= 0 ? OC_EARGUMENT : 0; }
#endif

/* Call with the lock held. Make up to `wanted` workers; if the system grants fewer, a job is only slower. */
static void ensure_workers(int wanted) {
    sigset_t all, before;
    if (pool.workers >= wanted)
        return;
    sigfillset(&all); /* the interpreter's threads handle signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < wanted) {
        pthread_t *thread = &pool.ids[pool.workers];
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int error = pthread_create(thread, &attributes, worker, (void *)(intptr_t)pool.workers);
        pthread_attr_destroy(&attributes);
        if (error)
            break;
#if defined(__linux__)
        pthread_setname_np(*thread, "offload-core");
#endif
        bind_worker(pool.workers++);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void oc_parallel_for(oc_task *task, void *context, int64_t n_items, int threads) {
    if (n_items <= 0)
        return;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads > n_items)
        threads = (int)n_items;
    int caller = !caller_is_elsewhere();
    if (n_items == 1 || (threads <= 1 && caller)) {
        control_word before = set_ieee();
        for (int64_t i = 0; i < n_items; i++)
            task(context, i);
        restore(before);
        return;
    }
    if (threads < 1)
        threads = 1;
    pthread_once(&fork_handlers, register_fork_handlers);
    pthread_mutex_lock(&pool.submit);
    pthread_mutex_lock(&pool.lock);
    ensure_workers(threads - caller);
    if (!pool.workers)
        caller = 1;
    if (threads > pool.workers + caller)
        threads = pool.workers + caller;
    for (int i = 0; i < threads; i++) {
        atomic_store_explicit(&ranges[i].next, n_items * i / threads, memory_order_relaxed);
        ranges[i].end = n_items * (i + 1) / threads;
    }
    pool.task = task;
    pool.context = context;
    pool.threads = threads;
    pool.caller = caller;
    pool.unfinished = threads - caller;
    pool.generation++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    if (caller)
        run_items(task, context, 0, threads);

    pthread_mutex_lock(&pool.lock);
    while (pool.unfinished)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.submit);
}

int oc_pool_workers(void) {
    pthread_mutex_lock(&pool.lock);
    int workers = pool.workers;
    pthread_mutex_unlock(&pool.lock);
    return workers;
}

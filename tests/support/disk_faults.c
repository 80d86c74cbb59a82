/* Loaded before the C library: system calls on files without a name fail, come back short or wait, as `offload_faults`
 * says. Python sets it through ctypes (disk_faults.py, which has the same fields). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ, WRITTEN, WAYS };
enum { FAILS, HALF, ODD, END, FULL };
enum { PAGE = 4096 };

struct {
    long seen[WAYS];            /* calls so far */
    long from[WAYS], to[WAYS];  /* the calls that do not go well: from <= number < to */
    long kind[WAYS];            /* in which way */
    long closed[WAYS];          /* calls wait while this is not 0 */
    long waiting[WAYS];         /* calls that wait */
    long no_direct, no_unnamed; /* errors of open() with O_DIRECT, O_TMPFILE; 0: none */
    long no_room;               /* of posix_fallocate() */
} offload_faults;

typedef ssize_t vector_call(int, const struct iovec *, int, off_t);
typedef int reserving_call(int, off_t, off_t);

static int is_scratch(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 0;
}

static ssize_t failed(int error) {
    errno = error;
    return -1;
}

static ssize_t move(int way, vector_call *call, int fd, const struct iovec *parts, int n, off_t at) {
    if (!is_scratch(fd))
        return call(fd, parts, n, at);
    const long number = __atomic_fetch_add(&offload_faults.seen[way], 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&offload_faults.closed[way], __ATOMIC_SEQ_CST)) {
        __atomic_fetch_add(&offload_faults.waiting[way], 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&offload_faults.closed[way], __ATOMIC_SEQ_CST))
            usleep(200);
        __atomic_fetch_sub(&offload_faults.waiting[way], 1, __ATOMIC_SEQ_CST);
    }
    if (number < offload_faults.from[way] || number >= offload_faults.to[way])
        return call(fd, parts, n, at);
    struct iovec half = parts[0];
    half.iov_len = (half.iov_len / 2 + PAGE - 1) / PAGE * PAGE;
    ssize_t moved;
    switch (offload_faults.kind[way]) {
    case HALF: return call(fd, &half, 1, at);
    case ODD: moved = call(fd, parts, 1, at); return moved > 100 ? moved - 100 : moved;
    case END: return 0;
    case FULL: return failed(ENOSPC);
    default: /* not before it has done harm */
        if (way == READ)
            memset(parts[0].iov_base, 0x3e, parts[0].iov_len);
        else
            call(fd, &half, 1, at);
        return failed(EIO);
    }
}

#define MOVES(name, way, real)                                                                                         \
    ssize_t name(int fd, const struct iovec *parts, int n, off_t at) {                                                 \
        return move(way, (vector_call *)dlsym(RTLD_NEXT, real), fd, parts, n, at);                                     \
    }
#define MOVES_BY_FLAGS(name, way, real)                                                                                \
    ssize_t name(int fd, const struct iovec *parts, int n, off_t at, int flags) {                                      \
        (void)flags;                                                                                                   \
        return move(way, (vector_call *)dlsym(RTLD_NEXT, real), fd, parts, n, at);                                     \
    }

MOVES(preadv, READ, "preadv")
MOVES(preadv64, READ, "preadv")
MOVES_BY_FLAGS(preadv2, READ, "preadv")
MOVES_BY_FLAGS(preadv64v2, READ, "preadv")
MOVES(pwritev, WRITTEN, "pwritev")
MOVES(pwritev64, WRITTEN, "pwritev")
MOVES_BY_FLAGS(pwritev2, WRITTEN, "pwritev")
MOVES_BY_FLAGS(pwritev64v2, WRITTEN, "pwritev")

static int opened(int folder, const char *path, int flags, mode_t mode) {
    if ((flags & O_TMPFILE) == O_TMPFILE && offload_faults.no_unnamed)
        return (int)failed((int)offload_faults.no_unnamed);
    if (flags & O_DIRECT && offload_faults.no_direct)
        return (int)failed((int)offload_faults.no_direct);
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPENS(name)                                                                                                    \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = mode_of(flags, rest);                                                                      \
        va_end(rest);                                                                                                  \
        return opened(AT_FDCWD, path, flags, mode);                                                                    \
    }

OPENS(open)
OPENS(open64)

int posix_fallocate(int fd, off_t at, off_t n) {
    if (offload_faults.no_room && is_scratch(fd))
        return (int)offload_faults.no_room;
    return ((reserving_call *)dlsym(RTLD_NEXT, "posix_fallocate"))(fd, at, n);
}

int posix_fallocate64(int fd, off_t at, off_t n) { return posix_fallocate(fd, at, n); }

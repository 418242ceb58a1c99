/* Moves the clocks of one process: LD_PRELOAD, for tests.

   DRA_TEST_CLOCK names a file of two 64-bit numbers, nanoseconds: what is added to the time of day (and, as after a
   suspend, to the time since boot), and what is added to the monotonic clock. Whoever writes there moves the clocks of the
   process at once. Waits until a moment are told the kernel in its own time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offsets;
static long (*kernel)(long, ...);

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("DRA_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (file < 0)
        return;
    void *found = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        offsets = found;
}

static int64_t offset_of(clockid_t id)
{
    if (!offsets)
        return 0;
    switch (id) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
    case CLOCK_BOOTTIME:
        return offsets[0];
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_MONOTONIC_RAW:
        return offsets[1];
    default:
        return 0;
    }
}

static struct timespec moved(const struct timespec *at, int64_t by)
{
    int64_t all = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + by;
    if (all < 0)
        all = 0;
    struct timespec result = {all / 1000000000, all % 1000000000};
    return result;
}

int clock_gettime(clockid_t id, struct timespec *at)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, at);
    if (status == 0)
        *at = moved(at, offset_of(id));
    return status;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *at, void *zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *at, struct timespec *left)
{
    static int (*real)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec until = flags & TIMER_ABSTIME ? moved(at, -offset_of(id)) : *at;
    return real(id, flags, &until, left);
}

#define UNTIL(name, first, clock)                                                        \
    int name(first, const struct timespec *at)                                           \
    {                                                                                    \
        static int (*real)(first, const struct timespec *);                              \
        if (!real)                                                                       \
            real = dlsym(RTLD_NEXT, #name);                                              \
        struct timespec until = moved(at, -offset_of(clock));                            \
        return real(waited, &until);                                                     \
    }

UNTIL(sem_timedwait, sem_t *waited, CLOCK_REALTIME)
UNTIL(pthread_mutex_timedlock, pthread_mutex_t *waited, CLOCK_REALTIME)

int sem_clockwait(sem_t *waited, clockid_t id, const struct timespec *at)
{
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec until = moved(at, -offset_of(id));
    return real(waited, id, &until);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t id, const struct timespec *at)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec until = moved(at, -offset_of(id));
    return real(cond, mutex, id, &until);
}

/* By which clock a condition is waited for is in its attributes, which nobody can ask for: Python's is monotonic. */
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *at)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    /* A moment near now by the time of day is one of that clock; monotonic ones are decades before it. */
    int64_t by = at->tv_sec > wall.tv_sec / 2 ? offset_of(CLOCK_REALTIME) : offset_of(CLOCK_MONOTONIC);
    struct timespec until = moved(at, -by);
    return real(cond, mutex, &until);
}

/* gRPC waits by futexes that it asks the kernel for itself. */
long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    int bitset = (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    if (number == SYS_futex && bitset && a[3]) {
        clockid_t id = a[1] & FUTEX_CLOCK_REALTIME ? CLOCK_REALTIME : CLOCK_MONOTONIC;
        struct timespec until = moved((const struct timespec *)a[3], -offset_of(id));
        return kernel(number, a[0], a[1], a[2], &until, a[4], a[5]);
    }
    return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

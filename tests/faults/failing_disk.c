/* Preloaded, it fails calls on files below FAILING_UNDER with EIO, as a disk that dies does.

A call fails while a file of its name ("fsync", "write", "rename", "read", "open") exists in the folder
FAILING_CALLS. Every other call goes to the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_on(const char *call) {
    const char *folder = getenv("FAILING_CALLS");
    char path[4096];
    if (folder == NULL) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, call);
    return access(path, F_OK) == 0;
}

static int is_below(const char *path) {
    const char *under = getenv("FAILING_UNDER");
    return under != NULL && strncmp(path, under, strlen(under)) == 0;
}

static int fails(int handle, const char *call) {
    int before = errno, result = 0;
    char link[64], path[4096];
    if (is_on(call)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length > 0) {
            path[length] = 0;
            result = is_below(path);
        }
    }
    errno = result ? EIO : before;
    return result;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILING(type, name, call, parameters, arguments) \
    type name parameters { return fails(handle, call) ? (type)-1 : NEXT(name) arguments; }

FAILING(int, fsync, "fsync", (int handle), (handle))
FAILING(int, fdatasync, "fsync", (int handle), (handle))
FAILING(ssize_t, write, "write", (int handle, const void *from, size_t size), (handle, from, size))
FAILING(ssize_t, writev, "write", (int handle, const struct iovec *parts, int count),
        (handle, parts, count))
FAILING(ssize_t, pwrite, "write", (int handle, const void *from, size_t size, off_t at),
        (handle, from, size, at))
FAILING(ssize_t, pwrite64, "write", (int handle, const void *from, size_t size, off64_t at),
        (handle, from, size, at))
FAILING(ssize_t, pwritev, "write", (int handle, const struct iovec *parts, int count, off_t at),
        (handle, parts, count, at))
FAILING(ssize_t, read, "read", (int handle, void *into, size_t size), (handle, into, size))
FAILING(ssize_t, pread, "read", (int handle, void *into, size_t size, off_t at),
        (handle, into, size, at))
FAILING(ssize_t, pread64, "read", (int handle, void *into, size_t size, off64_t at),
        (handle, into, size, at))

void *mmap(void *start, size_t size, int protection, int flags, int handle, off_t at) {
    if (handle >= 0 && fails(handle, "read")) return MAP_FAILED;
    return NEXT(mmap)(start, size, protection, flags, handle, at);
}

void *mmap64(void *start, size_t size, int protection, int flags, int handle, off64_t at) {
    if (handle >= 0 && fails(handle, "read")) return MAP_FAILED;
    return NEXT(mmap64)(start, size, protection, flags, handle, at);
}

#define OPENING(name)                                        \
    int name(const char *path, int flags, ...) {             \
        mode_t mode = 0;                                     \
        if (flags & (O_CREAT | O_TMPFILE)) {                 \
            va_list rest;                                    \
            va_start(rest, flags);                           \
            mode = va_arg(rest, mode_t);                     \
            va_end(rest);                                    \
        }                                                    \
        if (is_below(path) && is_on("open")) {               \
            errno = EIO;                                     \
            return -1;                                       \
        }                                                    \
        return NEXT(name)(path, flags, mode);                \
    }

OPENING(open)
OPENING(open64)

int rename(const char *from, const char *to) {
    if (is_below(to) && is_on("rename")) {
        errno = EIO;
        return -1;
    }
    return NEXT(rename)(from, to);
}

/* LD_PRELOAD: lets the n-th write-like call fail, counted over all processes that share a state file.

   NTHWRITE_STATE  file of struct state, mapped shared (tests/faults/nthwrite.py makes and reads it)
   NTHWRITE_UNDER  absolute folders, separated by ':'; only calls on what lies below them count
   NTHWRITE_LOG    a line for each call that failed: number, process, call, path
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct state { uint64_t count, first, last, error; }; /* calls first..last fail with errno `error` */

static struct state *state;
static char under[16][PATH_MAX];
static int folders;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("NTHWRITE_STATE"), *list = getenv("NTHWRITE_UNDER");
  if (!file || !list) return;
  int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped == MAP_FAILED) return;
  while (*list && folders < 16) {
    size_t length = strcspn(list, ":");
    if (length && length < PATH_MAX) { memcpy(under[folders], list, length); under[folders++][length] = 0; }
    list += length + (list[length] == ':');
  }
  state = mapped;
}

static int within(const char *path) {
  for (int i = 0; i < folders; i++) {
    size_t length = strlen(under[i]);
    if (!strncmp(path, under[i], length) && (path[length] == '/' || !path[length])) return 1;
  }
  return 0;
}

static int fails(const char *call, const char *path, int removal) {
  if (!state || !within(path)) return 0;
  /* A full disk lets files be removed. */
  if (removal && state->error != EROFS && state->error != EIO) return 0;
  uint64_t n = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
  if (n < state->first || n > state->last) return 0;
  const char *log = getenv("NTHWRITE_LOG");
  int fd = log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (fd >= 0) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%lu %d %s %s\n", (unsigned long)n, getpid(), call, path);
    syscall(SYS_write, fd, line, (size_t)length);
    syscall(SYS_close, fd);
  }
  errno = (int)state->error;
  return 1;
}

static int fails_fd(const char *call, int fd) {
  char link[64], path[PATH_MAX];
  if (!state || fd < 0) return 0;
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  errno = before;
  if (length <= 0) return 0;
  path[length] = 0;
  return fails(call, path, 0);
}

static int fails_at(const char *call, int dir, const char *name, int removal) {
  char path[2 * PATH_MAX], link[64];
  if (!state || !name) return 0;
  if (name[0] == '/') return fails(call, name, removal);
  int before = errno;
  if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
  else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  errno = before;
  if (length <= 0) return 0;
  snprintf(path + length, sizeof path - (size_t)length, "/%s", name);
  return fails(call, path, removal);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRITING(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))
#define MODE int mode = 0; if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
  va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }

#define OPEN(name) int name(const char *path, int flags, ...) { MODE REAL(name); \
  return WRITING(flags) && fails_at(#name, AT_FDCWD, path, 0) ? -1 : real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(name) int name(int dir, const char *path, int flags, ...) { MODE REAL(name); \
  return WRITING(flags) && fails_at(#name, dir, path, 0) ? -1 : real(dir, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *how) { REAL(name); \
  return strpbrk(how, "wa+") && fails_at(#name, AT_FDCWD, path, 0) ? NULL : real(path, how); }
FOPEN(fopen) FOPEN(fopen64)

#define BY_FD(type, name, parameters, ...) type name parameters { REAL(name); \
  return fails_fd(#name, fd) ? -1 : real(__VA_ARGS__); }
BY_FD(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
BY_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
BY_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
BY_FD(ssize_t, writev, (int fd, const struct iovec *data, int count), fd, data, count)
BY_FD(int, fsync, (int fd), fd)
BY_FD(int, fdatasync, (int fd), fd)
BY_FD(int, ftruncate, (int fd, off_t size), fd, size)
BY_FD(int, ftruncate64, (int fd, off64_t size), fd, size)
BY_FD(int, fallocate, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
BY_FD(ssize_t, sendfile, (int fd, int source, off_t *at, size_t size), fd, source, at, size)
BY_FD(ssize_t, sendfile64, (int fd, int source, off64_t *at, size_t size), fd, source, at, size)

ssize_t copy_file_range(int source, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags) {
  REAL(copy_file_range);
  return fails_fd("copy_file_range", fd) ? -1 : real(source, from, fd, to, size, flags);
}

#define BY_PATH(name, removal, parameters, dir, path, ...) int name parameters { REAL(name); \
  return fails_at(#name, dir, path, removal) ? -1 : real(__VA_ARGS__); }
BY_PATH(mkdir, 0, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
BY_PATH(mkdirat, 0, (int dir, const char *path, mode_t mode), dir, path, dir, path, mode)
BY_PATH(rename, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
BY_PATH(renameat, 0, (int at, const char *from, int dir, const char *to), dir, to, at, from, dir, to)
BY_PATH(renameat2, 0, (int at, const char *from, int dir, const char *to, unsigned f), dir, to, at, from, dir, to, f)
BY_PATH(link, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
BY_PATH(linkat, 0, (int at, const char *from, int dir, const char *to, int f), dir, to, at, from, dir, to, f)
BY_PATH(symlink, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
BY_PATH(truncate, 0, (const char *path, off_t size), AT_FDCWD, path, path, size)
BY_PATH(unlink, 1, (const char *path), AT_FDCWD, path, path)
BY_PATH(unlinkat, 1, (int dir, const char *path, int flags), dir, path, dir, path, flags)
BY_PATH(rmdir, 1, (const char *path), AT_FDCWD, path, path)

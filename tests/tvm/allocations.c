/* LD_PRELOAD: counts what asks the C library for 4 KiB or more at once. */
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t size);
extern void* __libc_memalign(size_t alignment, size_t size);

static atomic_long large;

long large_allocations(void) { return large; }

static void count(size_t size) { large += size >= 4096; }

void* malloc(size_t size) {
  count(size);
  return __libc_malloc(size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}

void* memalign(size_t alignment, size_t size) { return aligned_alloc(alignment, size); }

int posix_memalign(void** place, size_t alignment, size_t size) {
  *place = aligned_alloc(alignment, size);
  return *place ? 0 : 12; /* ENOMEM */
}

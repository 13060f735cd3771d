/* Memory that ends at a page nobody may touch: part of benchmarks/operators/fuzz.py.
 *
 * Preloaded, it stands for posix_memalign, from which torch takes the memory of every CPU tensor. While
 * guard_fill has a byte, each block has pages of its own, ends (up to its alignment) where an
 * inaccessible page begins, and begins behind another. Whatever the caller does not write holds that
 * byte, so that two runs with different bytes tell results that were read from there. What is left of
 * the pages is looked at when the block is freed; a freed block is inaccessible for good. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

enum { PAGE = 4096 };
static const size_t ARENA = (size_t)1 << 38; /* reserved, never used twice */

static const size_t MOST = (size_t)1 << 28; /* of one block */

/* Each block by its first page's number, far from what a kernel could write to. */
struct block {
    char *user;
    size_t size, pages;
    unsigned char fill;
};

static struct block *blocks;
static char *arena, *next;
static int fill = -1;
static int lock;

/* -1: what is asked for from here on has no guards. */
void guard_fill(int byte) { fill = byte; }

static void *reserved(size_t size, int rights) {
    return mmap(NULL, size, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    size_t rounded = (size + alignment - 1) / alignment * alignment;
    size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    if (alignment > PAGE || rounded < size || pages > MOST) return ENOMEM;
    if (fill < 0) {
        *result = __libc_memalign(alignment, size);
        return *result ? 0 : ENOMEM;
    }
    while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) {}
    if (arena == NULL) {
        blocks = reserved(ARENA / PAGE * sizeof *blocks, PROT_READ | PROT_WRITE);
        next = arena = reserved(ARENA, PROT_NONE);
    }
    char *start = next + PAGE;
    size_t taken = pages ? pages : PAGE; /* an empty block has an address of its own */
    int full = arena == MAP_FAILED || blocks == MAP_FAILED ||
               (size_t)(start - arena) + taken + PAGE > ARENA;
    if (!full) next = start + taken; /* the guard behind is the one before the next block */
    __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
    if (full) return ENOMEM;
    if (pages && mprotect(start, pages, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(start, fill, pages);
    char *user = start + pages - rounded;
    blocks[(start - arena) / PAGE] = (struct block){user, size, pages, (unsigned char)fill};
    *result = user;
    return 0;
}

static int untouched(const char *from, size_t count, unsigned char byte) {
    return count == 0 || ((unsigned char)*from == byte && !memcmp(from, from + 1, count - 1));
}

void free(void *pointer) {
    char *user = pointer;
    if (arena == NULL || user < arena || user >= arena + ARENA) {
        __libc_free(pointer);
        return;
    }
    /* The block begins in the first of its pages, or just behind them where it is empty. */
    char *start = (char *)((uintptr_t)user / PAGE * PAGE);
    struct block *head = &blocks[(start - arena) / PAGE];
    if (head->user != user) abort();
    head->user = NULL;
    if (head->pages == 0) return;
    char *behind = user + head->size;
    if (!untouched(start, user - start, head->fill)) abort();
    if (!untouched(behind, start + head->pages - behind, head->fill)) abort();
    madvise(start, head->pages, MADV_DONTNEED);
    mprotect(start, head->pages, PROT_NONE);
}

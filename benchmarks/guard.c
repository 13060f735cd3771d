/* Memory that ends at a page nobody may touch: part of benchmarks/fuzz_operators.py.
 *
 * Preloaded, it stands for posix_memalign, from which torch takes the memory of every CPU tensor. Each
 * block has pages of its own, ends (up to its alignment) where an inaccessible page begins, and begins
 * behind another. Whatever the caller does not write holds the byte given to guard_fill, so that two
 * runs with different bytes tell results that were read from there. What is left of the pages is looked
 * at when the block is freed; a freed block is inaccessible for good. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void __libc_free(void *);

enum { PAGE = 4096 };
static const size_t ARENA = (size_t)1 << 38; /* reserved, never used twice */

static const size_t MOST = (size_t)1 << 28; /* of one block */

static char *arena, *next;
static unsigned char fill = 0x3f;
static int lock;

void guard_fill(int byte) { fill = (unsigned char)byte; }

/* In front of each block: a page of its own that says what it is. */
struct block {
    char *user;
    size_t size, pages;
    unsigned char fill;
};

int posix_memalign(void **result, size_t alignment, size_t size) {
    size_t rounded = (size + alignment - 1) / alignment * alignment;
    size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    if (alignment > PAGE || rounded < size || pages > MOST) return ENOMEM;
    while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) {}
    if (arena == NULL)
        next = arena = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *base = next;
    int full = arena == MAP_FAILED || (size_t)(next - arena) + pages + 3 * PAGE > ARENA;
    if (!full) next += pages + 3 * PAGE; /* its head, a guard, the block, a guard */
    __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
    if (full) return ENOMEM;
    char *start = base + 2 * PAGE;
    if (mprotect(base, PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    if (pages && mprotect(start, pages, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(start, fill, pages);
    struct block *head = (struct block *)base;
    head->user = start + pages - rounded;
    head->size = size;
    head->pages = pages;
    head->fill = fill;
    *result = head->user;
    return 0;
}

void free(void *pointer) {
    char *user = pointer;
    if (arena == NULL || user < arena || user >= arena + ARENA) {
        __libc_free(pointer);
        return;
    }
    /* The block begins in the first of its pages, or just behind them where it is empty. */
    char *page = (char *)((uintptr_t)user / PAGE * PAGE);
    struct block *head = (struct block *)(page - 2 * PAGE);
    char *start = (char *)head + 2 * PAGE;
    if (head->user != user) abort();
    for (char *p = start; p < start + head->pages; p++) {
        if (p == user) p += head->size;
        if (p < start + head->pages && (unsigned char)*p != head->fill) abort();
    }
    size_t whole = head->pages + 2 * PAGE;
    madvise(head, whole, MADV_DONTNEED);
    mprotect(head, whole, PROT_NONE);
}

/* A hash table from 64-bit keys (pointers, handles; never 0) to small entries: open addressing,
 * linear probing, deletion by shifting back, so that look-ups do not slow down with age. Grows by
 * doubling. Not safe for concurrent use: the caller holds its lock. */
#ifndef TRANCHE_TABLE_H
#define TRANCHE_TABLE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tr_entry {
	uint64_t key;
	uint64_t aux;	/* meaning by kind */
	uint64_t owner; /* context, or 0 */
	uint32_t units; /* charged for this entry, in TR_UNIT */
	uint8_t dev;	/* index in the slice */
	uint8_t kind;
	uint16_t flags;
};

struct tr_table {
	struct tr_entry *slots;
	size_t mask; /* number of slots minus one; 0: nothing allocated */
	size_t used;
};

/* False when memory for the table cannot be had. An existing entry is replaced. */
bool tr_table_put(struct tr_table *t, const struct tr_entry *e);
/* The entry of this key, NULL if there is none; valid until the next put or take. */
struct tr_entry *tr_table_get(const struct tr_table *t, uint64_t key);
/* Removes the entry and copies it to *out. False if there is none. */
bool tr_table_take(struct tr_table *t, uint64_t key, struct tr_entry *out);
/* Removes an entry of this owner and copies it to *out; false when there is no more. *at is 0 at
 * first and then left alone between calls, so that removing all is one walk through the table. */
bool tr_table_take_owner(struct tr_table *t, uint64_t owner, size_t *at, struct tr_entry *out);
#endif

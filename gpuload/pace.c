#include "driver.h"
#include "pace.h"

/* Natural logarithm of 0 < x <= 1. The C library's has a symbol version too new for old systems. */
static double ln(double x)
{
	double sum = 0, power, y;
	int halves = 0;

	for (; x < 0.5; x *= 2)
		halves++;
	y = (x - 1) / (x + 1);
	power = y;
	for (int i = 1; i < 60; i += 2, power *= y * y)
		sum += power / i;
	return 2 * sum - halves * 0.69314718055994531;
}

/* xorshift64*, in (0, 1]. */
static double uniform(struct pace *p)
{
	p->seed ^= p->seed >> 12;
	p->seed ^= p->seed << 25;
	p->seed ^= p->seed >> 27;
	return (double)((p->seed * 2685821657736338717ull >> 11) + 1) / 9007199254740992.0;
}

static void wakes_up(struct pace *p, int64_t now)
{
	if (p->wakes < PACE_WAKES)
		p->wake[p->wakes++] = now;
	p->off_at = now + p->on_ns;
	p->due = (double)now;
}

void pace_start(struct pace *p, const struct options *o, unsigned number)
{
	*p = (struct pace){
		.mean_ns = o->rate > 0 ? 1e9 * o->threads / o->rate : 0, .poisson = o->poisson,
		.seed = (o->seed + 1ull) * 0x9e3779b97f4a7c15ull + number,
		.on_ns = (int64_t)(o->on_s * 1e9), .off_ns = (int64_t)(o->off_s * 1e9),
	};
	wakes_up(p, now_ns());
}

int64_t pace_next(struct pace *p)
{
	int64_t due;

	if (!p->mean_ns)
		return now_ns();
	due = (int64_t)p->due;
	sleep_until_ns(due);
	p->due += p->poisson ? -ln(uniform(p)) * p->mean_ns : p->mean_ns;
	return due;
}

bool pace_is_off(const struct pace *p)
{
	return p->off_ns && now_ns() >= p->off_at;
}

void pace_off(struct pace *p)
{
	sleep_until_ns(p->off_at + p->off_ns);
	wakes_up(p, now_ns());
}

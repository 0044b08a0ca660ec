#include "compat.h"
#define _GNU_SOURCE
#include "trace.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

bool tr_trace_on;
static int trace_fd = 2;

static void write_all(int fd, const char *buf, size_t len)
{
	int keep = errno;
	ssize_t n = write(fd, buf, len); /* one call: lines of several processes stay whole */
	(void)n;
	errno = keep;
}

static void line(int fd, const char *head, const char *fmt, va_list args)
{
	char buf[512];
	int at = snprintf(buf, sizeof buf, "%s", head);
	int n = vsnprintf(buf + at, sizeof buf - (size_t)at - 1, fmt, args);
	if (n < 0)
		return;
	size_t len = (size_t)at + (size_t)n;
	if (len > sizeof buf - 2)
		len = sizeof buf - 2;
	buf[len++] = '\n';
	write_all(fd, buf, len);
}

void tr_trace_init(void)
{
	const char *v = getenv("TRANCHE_TRACE");
	if (v == NULL || *v == 0 || strcmp(v, "0") == 0)
		return;
	if (strcmp(v, "1") != 0) {
		int fd = open(v, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
		if (fd < 0)
			return;
		trace_fd = fd;
	}
	tr_trace_on = true;
}

void tr_trace_write(const char *fmt, ...)
{
	char head[64];
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	snprintf(head, sizeof head, "tranche[%d.%ld] %lld.%06ld ", (int)getpid(),
		 (long)syscall(SYS_gettid), (long long)ts.tv_sec, ts.tv_nsec / 1000);
	va_list args;
	va_start(args, fmt);
	line(trace_fd, head, fmt, args);
	va_end(args);
}

void tr_complain(const char *fmt, ...)
{
	va_list args;
	va_start(args, fmt);
	line(2, "tranche: ", fmt, args);
	va_end(args);
}

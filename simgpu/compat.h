/* Binds to the oldest versions of the C library's symbols, so that what is built on a new system
 * runs on glibc 2.17 too. Included by the compiler's command line in every file of the simulator
 * that goes into a user's process. */
#ifndef SIMGPU_COMPAT_H
#define SIMGPU_COMPAT_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <features.h>
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#ifdef __aarch64__ /* began with glibc 2.17 */
#define SIM_OLD(fn, version) __asm__(".symver " #fn "," #fn "@GLIBC_2.17")
#else
#define SIM_OLD(fn, version) __asm__(".symver " #fn "," #fn "@" version)
#endif
SIM_OLD(pthread_mutexattr_setrobust, "GLIBC_2.12");
SIM_OLD(pthread_mutexattr_setpshared, "GLIBC_2.2.5");
SIM_OLD(pthread_mutexattr_init, "GLIBC_2.2.5");
SIM_OLD(pthread_mutexattr_destroy, "GLIBC_2.2.5");
SIM_OLD(pthread_mutexattr_settype, "GLIBC_2.2.5");
SIM_OLD(pthread_mutex_consistent, "GLIBC_2.12");
SIM_OLD(pthread_mutex_trylock, "GLIBC_2.2.5");
SIM_OLD(pthread_create, "GLIBC_2.2.5");
SIM_OLD(pthread_detach, "GLIBC_2.2.5");
SIM_OLD(pthread_join, "GLIBC_2.2.5");
SIM_OLD(pthread_once, "GLIBC_2.2.5");
SIM_OLD(pthread_key_create, "GLIBC_2.2.5");
SIM_OLD(pthread_setspecific, "GLIBC_2.2.5");
SIM_OLD(pthread_getspecific, "GLIBC_2.2.5");
SIM_OLD(pthread_sigmask, "GLIBC_2.2.5");
SIM_OLD(pthread_cond_init, "GLIBC_2.3.2");
SIM_OLD(pthread_cond_wait, "GLIBC_2.3.2");
SIM_OLD(pthread_cond_timedwait, "GLIBC_2.3.2");
SIM_OLD(pthread_cond_signal, "GLIBC_2.3.2");
SIM_OLD(pthread_cond_broadcast, "GLIBC_2.3.2");
SIM_OLD(dlsym, "GLIBC_2.2.5");
SIM_OLD(dlopen, "GLIBC_2.2.5");
SIM_OLD(dladdr, "GLIBC_2.2.5");
SIM_OLD(memcpy, "GLIBC_2.14");
#undef SIM_OLD
#endif
/* Functions that older systems have under other names only. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifndef MAP_32BIT /* x86-64 only: elsewhere nothing asks for addresses below 4 GiB */
#define MAP_32BIT 0
#endif
static inline int sim_fstat(int fd, struct stat *st)
{
	return (int)syscall(SYS_fstat, fd, st);
}
static inline int sim_memfd(const char *name)
{
	return (int)syscall(SYS_memfd_create, name, 1u /* MFD_CLOEXEC */);
}
#endif

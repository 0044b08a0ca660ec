/* The libraries run on glibc 2.17 and newer, whatever they were built on. Symbols that moved into
 * libc.so.6 in glibc 2.32 to 2.34 are bound to the versions that old systems have too.
 * Include first in every C file. test/elf reads the built files and holds the floor. */
#ifndef TRANCHE_COMPAT_H
#define TRANCHE_COMPAT_H

#if defined(__x86_64__)
#define TR_GLIBC_BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define TR_GLIBC_BASE "GLIBC_2.17"
#else
#error "x86-64 and arm64 are supported"
#endif

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TR_OLD(name) __asm__(".symver " #name "," #name "@" TR_GLIBC_BASE)
TR_OLD(dlopen);
TR_OLD(dlsym);
TR_OLD(dladdr);
TR_OLD(dlclose);
TR_OLD(dlerror);
TR_OLD(pthread_create);
TR_OLD(pthread_detach);
TR_OLD(pthread_join);
TR_OLD(pthread_once);
TR_OLD(pthread_sigmask);
TR_OLD(pthread_key_create);
TR_OLD(pthread_getspecific);
TR_OLD(pthread_setspecific);
#undef TR_OLD
#endif

#endif

/* Makes the program run on glibc 2.17: on x86-64 gcc would otherwise take the newest version of
 * these functions. */
#ifndef GPULOAD_COMPAT_H
#define GPULOAD_COMPAT_H
#if defined(__x86_64__) && defined(__GLIBC__)
#define GLIBC_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
GLIBC_OLD(pthread_create);
GLIBC_OLD(pthread_join);
GLIBC_OLD(dlopen);
GLIBC_OLD(dlsym);
GLIBC_OLD(dlerror);
GLIBC_OLD(__libc_start_main);
#endif
#endif

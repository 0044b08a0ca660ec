# The load generator: build/bin/gpuload, a driver-API program that runs wherever glibc 2.17 does.
GPULOAD_SRC := $(wildcard gpuload/*.c)
GPULOAD_OBJ := $(GPULOAD_SRC:gpuload/%.c=$(BUILD)/obj/gpuload/%.o)

# On x86-64 the program brings its own _start and asks for symbol versions that glibc 2.17 has
# (compat.h), whose threads and loader still live in libraries of their own.
ifeq ($(shell $(CC) -dumpmachine | cut -d- -f1),x86_64)
GPULOAD_LINK := -nostartfiles -no-pie -Wl,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2
else
GPULOAD_LINK := -pthread -ldl
endif

build: $(BUILD)/bin/gpuload

.PHONY: gpuload
gpuload: $(BUILD)/bin/gpuload ## the load generator

$(BUILD)/obj/gpuload/%.o: gpuload/%.c $(wildcard gpuload/*.h) include/cuda_abi.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_COMMON) -fno-pie -c -o $@ $<

$(BUILD)/bin/gpuload: $(GPULOAD_OBJ)
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ $(GPULOAD_LINK) -lc

-include bench/bench.mk
-include bench/shares-real/shares-real.mk test/gpu/gpu.mk

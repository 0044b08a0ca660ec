# nvmlprobe: asks NVML in a process of its own (embedded in the Go binary).
NVMLPROBE := $(BUILD)/bin/nvmlprobe
NVMLPROBE_SRC := $(wildcard tools/nvmlprobe/*.c)

build: $(NVMLPROBE)

# -nostartfiles: start.c has _start. libdl.so.2 by name: before glibc 2.34 dlopen is only there, and a
# later libdl.a would leave no trace of it.
$(NVMLPROBE): $(NVMLPROBE_SRC) tools/nvmlprobe/probe.h include/nvml_abi.h include/nvml_recovery.h \
		tools/nvmlprobe/nvmlprobe.mk
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_COMMON) -fPIE -pie -nostartfiles -Wl,-z,relro,-z,now -o $@ $(NVMLPROBE_SRC) \
		-Wl,--no-as-needed -l:libdl.so.2

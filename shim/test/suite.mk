# libcuda.so.1 over the simulated driver, in slices of its own: `make test-shim`, with SAN=asan or
# SAN=tsan too. One test: build/test/suite build/lib/libcuda.so.1 build/sim/libcuda.so.1 NAME
SUITE_SRC := $(wildcard shim/test/suite_*.c shim/test/memory_*.c)
SUITE := $(SHIM_OUT)/test/suite

# Linked against the simulated driver for its full list of symbols; what is loaded is ours, by
# LD_LIBRARY_PATH. The runner itself calls no driver.
$(SUITE): $(SUITE_SRC) shim/test/suite.h shim/common/ledger.c $(SHIM_HEADERS) $(BUILD)/sim/libcuda.so.1
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_COMMON) -Ishim/common -Isimgpu -Ishim/test $(SANFLAGS) $(SUITE_SRC) \
		shim/common/ledger.c $(SIM_STATE_O) $(BUILD)/sim/libcuda.so.1 -Wl,--enable-new-dtags \
		-Wl,-rpath,$(abspath $(BUILD)/sim) -ldl -lm -o $@

# Memory that lives as long as the process is no leak; a test's fork goes on with threads.
SUITE_ENV := ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=die_after_fork=0:halt_on_error=1:exitcode=66

.PHONY: test-shim
test-shim: $(SUITE) $(SHIM_OUT)/lib/libcuda.so.1 ## the CUDA library: every way to memory, shared, forked, killed; devices; broken slices
	$(SUITE_ENV) $(SUITE) $(abspath $(SHIM_OUT)/lib/libcuda.so.1) $(abspath $(BUILD)/sim/libcuda.so.1)

# Benchmarks. What each figure means: docs/bench.md.
BENCH_SHIM := $(BUILD)/bench/shim
BENCH_SRC := $(wildcard bench/shim/*.c)
BENCH_HDR := $(wildcard bench/shim/*.h) include/tranche_abi.h include/cuda_abi.h
NULL_DRIVER := $(BUILD)/sim/libcuda-null.so.1
SHIM_CUDA := $(BUILD)/lib/libcuda.so.1

.PHONY: bench bench-shim bench-alone bench-kill
bench: bench-shim bench-alone bench-kill ## all benchmarks

bench-shim: $(BENCH_SHIM) $(NULL_DRIVER) $(SHIM_CUDA) ## what the library adds to a driver call
	$(BENCH_SHIM) --null $(NULL_DRIVER) --shim $(SHIM_CUDA) --json $(BUILD)/bench/shim.json

bench-alone: build ## accuracy of the compute limit, one tenant alone
	bench/alone/alone.sh $(BUILD)/bench/alone.json

bench-kill: build $(BUILD)/bin/gpuload ## the memory limit while processes are killed at random
	@mkdir -p $(BUILD)/bench
	$(GO) test -count=1 -v ./bench/kill -kill.json=$(CURDIR)/$(BUILD)/bench/kill.json

.PHONY: bench-node
bench-node: build ## what kubelet waits for tranche node, and what it takes while idle
	@mkdir -p $(BUILD)/bench
	$(GO) run ./bench/node $(BUILD)/bin/tranche $(BUILD)/bench/node.json

$(BENCH_SHIM): $(BENCH_SRC) $(BENCH_HDR)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_COMMON) -D_GNU_SOURCE -o $@ $(BENCH_SRC) -ldl

include bench/shares/shares.mk
include bench/scheduler/scheduler.mk

# The extender: docs/bench.md. OPENB is a directory with the openb trace; without it that part is left out.
OPENB ?= ../shared/data/openb
BENCH_TRACE = $(if $(wildcard $(OPENB)/openb_pod_list_default.csv),-trace-nodes $(OPENB)/openb_node_list_gpu_node.csv -trace-pods $(OPENB)/openb_pod_list_default.csv)

.PHONY: bench-scheduler
bench-scheduler: ## the extender: decisions, HTTP, a trace through its protocol
	@mkdir -p $(BUILD)/bench
	$(Q)$(GO) build -o $(BUILD)/bench/scheduler ./bench/scheduler
	$(BUILD)/bench/scheduler -json $(BUILD)/bench/scheduler.json $(BENCH_TRACE) $(BENCH_ARGS)

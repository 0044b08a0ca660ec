# Shares in virtual time: bench/shares/README.md says what is modelled and what the figures mean.
SHARES := $(BUILD)/bench/shares
SHARES_DIR := bench/shares/world
SHARES_HDR := $(wildcard $(SHARES_DIR)/*.h bench/shares/*.h simgpu/*.h) $(SHIM_HEADERS)
# One process: the shipped meter, its system calls and threads renamed to the virtual machine's.
SHARES_METER := $(wildcard $(addprefix shim/cuda/,launch.c meter.c unit.c credit.c cover.c cost.c \
	graphcost.c timeline.c helper.c capture.c stream.c lease.c)) shim/common/trace.c
SHARES_RENAME := -Dsyscall=share_syscall -Dpthread_create=share_thread_create \
	-Dpthread_detach=share_thread_detach
SHARES_PROCESS_O := $(SHARES_METER:%.c=$(SHARES)/obj/%.o) $(SHARES)/obj/process.o
SHARES_WORLD_O := $(addprefix $(SHARES)/obj/,world.o co.o driver.o program.o feedback.o engine.o queue.o)
SHARES_LIBS := $(addprefix $(SHARES)/,world.so process.so process-broken.so)
SHARES_CFLAGS := $(CFLAGS_COMMON) -I$(SHARES_DIR) -Ishim/common -Ishim/cuda -Isimgpu
SHARES_SECONDS ?= 120

.PHONY: shares bench-shares test-shares
shares: $(SHARES_LIBS)
	$(Q)$(GO) build -o $(SHARES)/shares ./bench/shares

# Virtual time and controls, then real processes (bench-shares-real), into one file.
bench-shares: shares ## what tenants get of a GPU: in virtual time, controls, then real processes
	@status=0; $(SHARES)/shares -seconds $(SHARES_SECONDS) -json $(BUILD)/bench/shares.json \
		-plots $(SHARES) || status=1; \
	$(MAKE) bench-shares-real SHARES_REAL_JSON=$(BUILD)/bench/shares.json || status=1; exit $$status

test-go: $(SHARES_LIBS)
test-shares: $(SHARES_LIBS) ## the shares suite in short: key scenarios, and a broken charge that it must notice
	$(GO) test -count=1 ./bench/shares/...

$(SHARES)/obj/shim/%.o: shim/%.c $(SHARES_HDR)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHARES_CFLAGS) $(SHARES_RENAME) -c $< -o $@
$(SHARES)/obj/%.o: $(SHARES_DIR)/%.c $(SHARES_HDR)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHARES_CFLAGS) -c $< -o $@
$(SHARES)/obj/%.o: simgpu/%.c $(SHARES_HDR)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHARES_CFLAGS) -c $< -o $@
# Renamed into place, so that a run under way keeps its own.
$(SHARES)/process.so: $(SHARES_PROCESS_O)
	$(Q)$(CC) -shared -Wl,-z,defs -o $@.new $^ -lpthread && mv $@.new $@
$(SHARES)/process-broken.so: $(SHARES_PROCESS_O) $(SHARES)/obj/broken.o
	$(Q)$(CC) -shared -Wl,-z,defs -Wl,--wrap=tr_credit_report -o $@.new $^ -lpthread && mv $@.new $@
$(SHARES)/world.so: $(SHARES_WORLD_O)
	$(Q)$(CC) -shared -Wl,-z,defs -o $@.new $^ -lm -ldl && mv $@.new $@

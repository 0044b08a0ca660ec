# For a machine with a GPU: docs/test-gpu.md.
CALIBRATE := $(BUILD)/bin/calibrate
CALIBRATE_SRC := $(wildcard test/gpu/calibrate/*.c)
CALIBRATE_OBJ := $(CALIBRATE_SRC:test/gpu/calibrate/%.c=$(BUILD)/obj/calibrate/%.o) \
	$(BUILD)/obj/gpuload/driver.o $(BUILD)/obj/gpuload/start.o
GPU_KIT := $(BUILD)/gpu-kit
GPU_KIT_FILES := $(addprefix $(BUILD)/bin/,tranche gpuload calibrate shares-real) $(BUILD)/sim/simctl \
	test/gpu/run.sh docs/test-gpu.md

build: $(CALIBRATE)

$(BUILD)/obj/calibrate/%.o: test/gpu/calibrate/%.c $(wildcard test/gpu/calibrate/*.h gpuload/*.h) include/cuda_abi.h include/nvml_abi.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_COMMON) -fno-pie -c -o $@ $<

$(CALIBRATE): $(CALIBRATE_OBJ)
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ $(GPULOAD_LINK) -l:libm.so.6 -lc

.PHONY: gpu-kit test-gpu test-calibrate
gpu-kit: build $(BUILD)/bin/shares-real ## what is carried to a machine with a GPU: build/gpu-kit, and as a tarball
	@rm -rf $(GPU_KIT) && mkdir -p $(GPU_KIT)
	$(Q)cp $(GPU_KIT_FILES) $(GPU_KIT)
	$(Q)tar -czf $(GPU_KIT).tar.gz -C $(BUILD) $(notdir $(GPU_KIT))
	@echo "$(GPU_KIT).tar.gz: unpack it on a machine with a GPU and run gpu-kit/run.sh"

# Without a GPU this says so and is no error, as most machines have none; GPU=required makes it one.
test-gpu: gpu-kit ## calibration and shares on a real GPU, if there is one (GPU=required: else fail)
	@$(GPU_KIT)/run.sh --out $(BUILD)/bench/gpu $(TEST_GPU) || \
		{ status=$$?; [ $$status = 3 ] && [ "$(GPU)" != required ]; }

test-calibrate: build ## calibrating the simulated GPU gives back its spec; the kernels in an interpreter
	$(GO) test -count=1 ./test/gpu

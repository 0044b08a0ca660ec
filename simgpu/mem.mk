# Tests of the memory half of the simulated driver.
.PHONY: test-sim
test-sim: $(BUILD)/test/sim/memory $(SIM_OUT)/libcuda.so.1 ## memory of the simulated driver: every family to the limit, lifetimes, death
	$(BUILD)/test/sim/memory

$(BUILD)/test/sim/memory: simgpu/test/memory.c $(SIM_STATE_O) $(SIM_OUT)/libcuda.so.1
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_COMMON) -Isimgpu -include simgpu/compat.h -o $@ $(filter %.c %.o,$^) \
		$(SIM_OUT)/libcuda.so.1 -Wl,-rpath,$(abspath $(SIM_OUT)) -lm

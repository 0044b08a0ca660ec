# Tests of the time half of the simulated driver.
SIM_TIME_TEST := $(BUILD)/test/simtime

.PHONY: test-simtime
test-simtime: $(SIM_TIME_TEST)/engine $(SIM_TIME_TEST)/driver $(SIM_OUT)/libcuda.so.1 $(SIM_OUT)/simctl ## time, streams, events, graphs and capture of the simulated driver
	$(SIM_TIME_TEST)/engine
	$(SIM_TIME_TEST)/driver

$(SIM_TIME_TEST):
	@mkdir -p $@

# In virtual time, without the driver.
$(SIM_TIME_TEST)/engine: simgpu/test/time_engine.c simgpu/engine.c simgpu/queue.c simgpu/engine.h simgpu/queue.h | $(SIM_TIME_TEST)
	$(Q)$(CC) $(CFLAGS_COMMON) -Isimgpu -o $@ $(filter %.c,$^)

# Against libcuda.so.1, on a machine of its own. Reads the truth from the state file.
$(SIM_TIME_TEST)/driver: simgpu/test/time_driver.c simgpu/test/time_graph.c simgpu/test/time_capture.c $(SIM_STATE_O) $(SIM_OUT)/libcuda.so.1 simgpu/test/time_test.h | $(SIM_TIME_TEST)
	$(Q)$(CC) $(CFLAGS_COMMON) -Isimgpu -include simgpu/compat.h -o $@ $(filter %.c %.o,$^) \
		$(SIM_OUT)/libcuda.so.1 -Wl,-rpath,'$$ORIGIN/../../sim' -ldl -lm

# The simulated libnvidia-ml.so.1, on the same state as the simulated libcuda.so.1.
NVML_SIM_O := $(patsubst simgpu/nvml/%.c,$(SIM_OBJ)/nvml/%.o,$(wildcard simgpu/nvml/*.c))
NVML_SIM_HDR := $(wildcard simgpu/nvml/*.h simgpu/*.h) include/nvml_abi.h include/nvml_recovery.h simgpu/nvml/exports.def

sim: $(SIM_OUT)/libnvidia-ml.so.1

$(SIM_OBJ)/nvml/%.o: simgpu/nvml/%.c $(NVML_SIM_HDR)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SIM_CFLAGS) $(SIM_EXTRA) -c -o $@ $<

$(SIM_OUT)/libnvidia-ml.so.1: $(NVML_SIM_O) $(SIM_STATE_O) simgpu/nvml/nvml.map | $(SIM_OUT)
	$(Q)$(CC) -shared $(SIM_EXTRA) -Wl,-soname,libnvidia-ml.so.1 \
		-Wl,--version-script=simgpu/nvml/nvml.map -Wl,-z,relro,-z,now -o $@ \
		$(filter %.o,$^) $(SIM_LIBS)

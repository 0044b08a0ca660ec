# libnvidia-ml.so.1: NVML as the slice has it.
SHIM_NVML_SRC := $(wildcard shim/nvml/*.c)
SHIM_NVML_OBJ := $(SHIM_NVML_SRC:shim/%.c=$(SHIM_OBJ)/%.o)

$(SHIM_OBJ)/nvml.map: shim/nvml/hooks.def
	@mkdir -p $(@D)
	@{ echo '{ global:'; sed -n 's/^TR_[A-Z]*(\(nvml[A-Za-z0-9_]*\).*/\t\1;/p' $<; \
		echo 'local: *; };'; } >$@

$(SHIM_OUT)/lib/libnvidia-ml.so.1: $(SHIM_COMMON_OBJ) $(SHIM_NVML_OBJ) $(SHIM_OBJ)/nvml.map \
		$(SHIM_OUT)/stub/libnvidia-ml-driver.so.1
	@mkdir -p $(@D)
	$(CC) $(SHIM_LDFLAGS) -Wl,-soname,libnvidia-ml.so.1 \
		-Wl,--version-script=$(SHIM_OBJ)/nvml.map $(SHIM_COMMON_OBJ) $(SHIM_NVML_OBJ) \
		$(SHIM_OUT)/stub/libnvidia-ml-driver.so.1 $(SHIM_LIBS) -o $@
	ln -sf libnvidia-ml.so.1 $(@D)/libnvidia-ml.so

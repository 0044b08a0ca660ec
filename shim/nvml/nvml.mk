# libnvidia-ml.so.1: NVML as the slice has it.
SHIM_NVML_SRC := $(wildcard shim/nvml/*.c)
SHIM_NVML_OBJ := $(SHIM_NVML_SRC:shim/%.c=$(SHIM_OBJ)/%.o)
# A hook tells its callers by the return address (tr_inside).
$(SHIM_NVML_OBJ): SHIM_CFLAGS += -fno-optimize-sibling-calls

$(SHIM_OBJ)/nvml.map: shim/nvml/hooks.def
	@mkdir -p $(@D)
	@{ echo '{ global:'; sed -n 's/^TR_[A-Z]*(\(nvml[A-Za-z0-9_]*\).*/\t\1;/p' $<; \
		echo 'local: *; };'; } >$@

$(SHIM_OUT)/lib/libnvidia-ml.so.1: $(SHIM_COMMON_OBJ) $(SHIM_NVML_OBJ) $(SHIM_OBJ)/nvml.map \
		$(SHIM_OUT)/stub/libnvidia-ml-driver.so.1
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_LDFLAGS) -Wl,-soname,libnvidia-ml.so.1 \
		-Wl,--version-script=$(SHIM_OBJ)/nvml.map $(SHIM_COMMON_OBJ) $(SHIM_NVML_OBJ) \
		$(SHIM_OUT)/stub/libnvidia-ml-driver.so.1 $(SHIM_LIBS) -o $@
	$(Q)ln -sf libnvidia-ml.so.1 $(@D)/libnvidia-ml.so

# Unit test of the filters against a test double of the driver's NVML. SAN=asan as for the rest.
NVML_TEST := $(SHIM_OUT)/test/nvml
$(NVML_TEST)/fake/libnvidia-ml.so.1: shim/nvml/test/fake_nvml.c $(SHIM_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_CFLAGS) -Ishim/nvml -shared -Wl,-soname,libnvidia-ml.so.1 $< -o $@

$(NVML_TEST)/%: shim/nvml/test/%.c shim/nvml/test/slice.c shim/nvml/test/slice.h \
		$(SHIM_OBJ)/common/ledger.o $(SHIM_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_CFLAGS) -Ishim/nvml $< shim/nvml/test/slice.c $(SHIM_OBJ)/common/ledger.o \
		$(SHIM_LIBS) -o $@

.PHONY: test-shimnvml
test-shimnvml: $(NVML_TEST)/unit $(NVML_TEST)/fake/libnvidia-ml.so.1 $(SHIM_OUT)/lib/libnvidia-ml.so.1 ## test what NVML shows of a slice
	$(NVML_TEST)/unit $(CURDIR)/$(SHIM_OUT)/lib/libnvidia-ml.so.1 \
		$(CURDIR)/$(NVML_TEST)/fake/libnvidia-ml.so.1 $(CURDIR)/$(NVML_TEST)/slice

# NVIDIA's own nvidia-smi in a slice of a simulated GPU.
.PHONY: test-shimnvml-smi
test-shimnvml-smi: $(NVML_TEST)/smi $(SHIM_OUT)/lib/libnvidia-ml.so.1 $(BUILD)/sim/libnvidia-ml.so.1 ## NVIDIA's nvidia-smi, 535 and 550, shows the slice
	@tools/fetch-nvidia.sh || test $$? = 3
	@for v in 535 550; do \
		test -e $(BUILD)/nvidia/$$v/nvidia-smi || { echo "nvidia-smi $$v cannot be had here: skipped"; continue; }; \
		$(NVML_TEST)/smi $(CURDIR)/$(SHIM_OUT)/lib/libnvidia-ml.so.1 \
			$(CURDIR)/$(BUILD)/sim/libnvidia-ml.so.1 $(CURDIR)/$(NVML_TEST)/smi-slice \
			$(CURDIR)/$(BUILD)/nvidia/$$v/nvidia-smi || exit 1; \
	done

# The two libraries that go into CUDA processes. Objects per library and per sanitizer, so that
# `make test-shim SAN=asan` builds beside the plain ones.
#   SAN=        plain, build/lib
#   SAN=asan    AddressSanitizer + UBSan, build/san/asan/lib
#   SAN=tsan    ThreadSanitizer, build/san/tsan/lib
SAN ?=
SANFLAGS_asan := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANFLAGS_tsan := -fsanitize=thread
SANFLAGS := $(if $(SAN),$(SANFLAGS_$(SAN)))
SHIM_OUT := $(BUILD)$(if $(SAN),/san/$(SAN))
SHIM_OBJ := $(SHIM_OUT)/obj/shim

SHIM_CFLAGS := $(CFLAGS_COMMON) -Ishim/common -fno-plt $(SANFLAGS)
# The placeholder that `tranche run` replaces: TR_RPATH_FIELD bytes in all.
SHIM_RPATH := $(shell printf '/@@TRANCHE_DRIVER@@'; printf '/%.0s' $$(seq 237))
# Old glibc keeps dlopen and threads in files of their own; a sanitizer's runtime brings its own.
SHIM_LDFLAGS := -shared -Wl,-z,nodelete,-z,relro,-z,noexecstack,-z,defs -Wl,--disable-new-dtags \
	-Wl,-rpath,'$(SHIM_RPATH)' -Wl,--no-as-needed $(SANFLAGS)
SHIM_LIBS := $(if $(SAN),-ldl -lpthread,-l:libdl.so.2 -l:libpthread.so.0)
ifneq ($(SAN),)
SHIM_LDFLAGS := $(filter-out -Wl$(comma)-z$(comma)nodelete%,$(SHIM_LDFLAGS)) 
SHIM_LDFLAGS := -shared -Wl,-z,nodelete,-z,relro -Wl,--disable-new-dtags -Wl,-rpath,'$(SHIM_RPATH)' \
	-Wl,--no-as-needed $(SANFLAGS)
endif

SHIM_COMMON_SRC := $(wildcard shim/common/*.c)
SHIM_CUDA_SRC := $(wildcard shim/cuda/*.c)
SHIM_COMMON_OBJ := $(SHIM_COMMON_SRC:shim/%.c=$(SHIM_OBJ)/%.o)
SHIM_CUDA_OBJ := $(SHIM_CUDA_SRC:shim/%.c=$(SHIM_OBJ)/%.o)
SHIM_HEADERS := $(wildcard include/*.h shim/common/*.h shim/cuda/*.h shim/cuda/*.def shim/nvml/*.h shim/nvml/*.def)

.PHONY: shim
shim: $(SHIM_OUT)/lib/libcuda.so.1 $(SHIM_OUT)/lib/libnvidia-ml.so.1 ## build the two libraries

$(SHIM_OBJ)/%.o: shim/%.c $(SHIM_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_CFLAGS) -I$(<D) -c $< -o $@

# A library with the driver's fixed name and nothing in it, to link against.
$(SHIM_OUT)/stub/lib%-driver.so.1:
	@mkdir -p $(@D)
	$(Q)echo | $(CC) -shared -xc - -nostdlib -Wl,-soname,$(@F) -o $@

# The export list, from the table of hooks.
$(SHIM_OBJ)/%.map: shim/%/hooks.def
	@mkdir -p $(@D)
	@{ echo '{ global:'; sed -n 's/^TR_HOOK(\([A-Za-z0-9_]*\).*/\t\1;/p' $<; \
		echo 'local: *; };'; } >$@

$(SHIM_OUT)/lib/libcuda.so.1: $(SHIM_COMMON_OBJ) $(SHIM_CUDA_OBJ) $(SHIM_OBJ)/cuda.map \
		$(SHIM_OUT)/stub/libcuda-driver.so.1
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_LDFLAGS) -Wl,-soname,libcuda.so.1 -Wl,--version-script=$(SHIM_OBJ)/cuda.map \
		$(SHIM_COMMON_OBJ) $(SHIM_CUDA_OBJ) $(SHIM_OUT)/stub/libcuda-driver.so.1 \
		$(SHIM_LIBS) -o $@
	$(Q)ln -sf libcuda.so.1 $(@D)/libcuda.so

-include shim/nvml/nvml.mk
-include shim/test/ledger.mk shim/test/meter.mk shim/test/suite.mk

# The simulated machine: libcuda.so.1, libnvidia-ml.so.1 (simgpu/nvml), simctl, and a null driver.
SIM_OUT := $(BUILD)/sim
SIM_OBJ := $(BUILD)/obj/simgpu
SIM_CFLAGS := $(CFLAGS_COMMON) -Isimgpu -I$(SIM_OBJ) -include simgpu/compat.h
SIM_HDR := $(wildcard simgpu/*.h include/cuda_*.h)
# libpthread and libdl by name: on older systems they are not part of libc.
SIM_LIBS := -Wl,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -l:libm.so.6 -Wl,--as-needed

# What knows the state file but not CUDA: part of the three programs.
SIM_STATE_O := $(patsubst %,$(SIM_OBJ)/%.o,models spec trace state process engine queue)
SIM_CUDA_O := $(patsubst simgpu/%.c,$(SIM_OBJ)/%.o,\
	$(filter-out simgpu/simctl.c simgpu/null.c,$(wildcard simgpu/*.c)))

-include $(wildcard simgpu/nvml/*.mk)
-include simgpu/time.mk simgpu/mem.mk

.PHONY: sim
sim: $(SIM_OUT)/libcuda.so.1 $(SIM_OUT)/libcuda-null.so.1 $(SIM_OUT)/simctl ## build the simulated driver

$(SIM_OBJ)/%.o: simgpu/%.c $(SIM_HDR) | $(SIM_OBJ)
	$(Q)$(CC) $(SIM_CFLAGS) $(SIM_EXTRA) -c -o $@ $<

$(SIM_OBJ) $(SIM_OUT):
	@mkdir -p $@

# A weak definition of every function that a real driver exports.
$(SIM_OBJ)/stubs.c: simgpu/exports.txt | $(SIM_OBJ)
	@awk 'BEGIN { print "extern int sim_stub(const char *name);" } \
		{ printf "int %s(void);\n__attribute__((weak, visibility(\"default\"))) int %s(void)\n{\n\treturn sim_stub(\"%s\");\n}\n", $$1, $$1, $$1 }' $< >$@
$(SIM_OBJ)/nullstubs.c: simgpu/exports.txt | $(SIM_OBJ)
	@awk 'BEGIN { print "extern __thread unsigned long tr_null_calls __attribute__((tls_model(\"initial-exec\")));" } \
		{ printf "int %s(void);\n__attribute__((weak, visibility(\"default\"))) int %s(void)\n{\n\ttr_null_calls++;\n\treturn 0;\n}\n", $$1, $$1 }' $< >$@
# The answers of cuGetProcAddress, with the functions that they name.
$(SIM_OBJ)/procaddress.c: simgpu/procaddress.tsv simgpu/procaddr.h | $(SIM_OBJ)
	@awk -F'\t' 'BEGIN { print "#include \"procaddr.h\"" } /^#/ || NF < 4 { next } \
		{ d = d (s[$$4]++ ? "" : "extern void " $$4 "(void);\n"); \
		  t = t sprintf("\t{ \"%s\", %s, %s, %s },\n", $$1, $$2, $$3 == "*" ? -1 : $$3, $$4) } \
		END { printf "%s%s%s%s", d, "const struct sim_proc_row sim_proc_rows[] = {\n", t, "\t{ 0, 0, 0, 0 }\n};\n" }' $< >$@
$(SIM_OBJ)/%.o: $(SIM_OBJ)/%.c
	$(Q)$(CC) $(SIM_CFLAGS) $(SIM_EXTRA) -c -o $@ $<

$(SIM_OUT)/libcuda.so.1: $(SIM_CUDA_O) $(SIM_OBJ)/stubs.o $(SIM_OBJ)/procaddress.o simgpu/cuda.map | $(SIM_OUT)
	$(Q)$(CC) -shared $(SIM_EXTRA) -Wl,-soname,libcuda.so.1 -Wl,--version-script=simgpu/cuda.map \
		-Wl,-Bsymbolic,-z,relro,-z,now -o $@ $(filter %.o,$^) $(SIM_LIBS)

$(SIM_OUT)/libcuda-null.so.1: $(SIM_OBJ)/null.o $(SIM_OBJ)/nullstubs.o $(SIM_OBJ)/procfind.o $(SIM_OBJ)/procaddress.o simgpu/cuda.map | $(SIM_OUT)
	$(Q)$(CC) -shared $(SIM_EXTRA) -Wl,-soname,libcuda.so.1 -Wl,--version-script=simgpu/cuda.map \
		-Wl,-Bsymbolic,-z,relro,-z,now -o $@ $(filter %.o,$^)

# A program for old systems brings its own _start (gpuload/start.c says why).
ifeq ($(shell $(CC) -dumpmachine | cut -d- -f1)$(SIM_EXTRA),x86_64)
SIM_START := $(BUILD)/obj/gpuload/start.o -nostartfiles -no-pie -Wl,--defsym,__dso_handle=0
endif
$(SIM_OUT)/simctl: $(SIM_OBJ)/simctl.o $(SIM_STATE_O) $(filter $(BUILD)/%.o,$(SIM_START)) | $(SIM_OUT)
	$(Q)$(CC) $(SIM_EXTRA) -o $@ $(SIM_OBJ)/simctl.o $(SIM_STATE_O) $(SIM_START) $(SIM_LIBS) -lc

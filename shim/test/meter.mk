# The meter in virtual time: no driver, no GPU, the same figures on every machine.
METER_SRC := $(addprefix shim/cuda/,meter.c unit.c credit.c lease.c cover.c cost.c graphcost.c timeline.c \
	helper.c launch.c capture.c stream.c) shim/common/trace.c shim/test/meter_world.c shim/test/meter_test.c
METER_TEST := $(SHIM_OUT)/test/meter_test

$(METER_TEST): $(METER_SRC) $(SHIM_HEADERS) shim/test/meter_world.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(SHIM_CFLAGS) -Ishim/cuda -Ishim/test $(METER_SRC) -lm -o $@

.PHONY: test-meter
test-meter: $(METER_TEST) ## the compute limit in virtual time
	$(METER_TEST)

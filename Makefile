# Tranche. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := build
MAKEFLAGS += --no-builtin-rules
BUILD := build
Q := $(if $(V),,@)# V=1 shows commands
CC ?= cc
ifeq ($(origin CC),default)
CC := gcc
endif

CWARN := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
	-Wcast-qual -Wwrite-strings -Wformat=2 -Wundef -Wvla
CFLAGS_COMMON := -std=gnu11 -O2 -g -fvisibility=hidden -fPIC -pthread $(CWARN) -Iinclude

.PHONY: help
help: ## show this list
	@grep -hE '^[a-zA-Z0-9_-]+:.*## ' $(MAKEFILE_LIST) | sort -u | \
		awk -F':.*## ' '{ printf "  %-18s %s\n", $$1, $$2 }'

include shim/shim.mk
include simgpu/simgpu.mk
include gpuload/gpuload.mk
include tools/nvmlprobe/nvmlprobe.mk
include demo/demo.mk
include test/test.mk
include test/e2e/e2e.mk
include tools/go.mk
include deploy/deploy.mk

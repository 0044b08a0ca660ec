# shim.mk

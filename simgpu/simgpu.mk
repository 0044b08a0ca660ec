# simgpu.mk

# gpuload.mk

# nvmlprobe.mk

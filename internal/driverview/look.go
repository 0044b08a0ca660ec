package driverview

// Found is the driver that Build would take.
type Found struct {
	// Version is "" when its files tell none (WSL).
	Version string
	// CUDA and NVML are the two libraries as the host names them; NVMLHere is the second as this process
	// sees it.
	CUDA, NVML, NVMLHere string
	// Report says what was looked at and not taken.
	Report Report
}

// Find looks for the driver as Build does and makes nothing. Its errors are those of Build.
func (b *Builder) Find() (Found, error) {
	var f Found
	d, err := choose(places(b.cfg.Root, b.cfg.Arch), b.cfg.Arch, b.kernel(), b.wanted, &f.Report)
	if err == nil {
		f.Version, f.CUDA, f.NVML, f.NVMLHere = d.version, d.cuda.path, d.nvml.path, d.nvml.local
	}
	return f, err
}

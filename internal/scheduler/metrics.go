package scheduler

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// register makes the metrics.
func (s *Server) register() {
	s.latency = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "tranche_scheduler_request_duration_seconds",
		Help: "Time to answer, by verb.", Buckets: prometheus.ExponentialBuckets(0.00005, 2, 18)}, []string{"verb"})
	s.registry.MustRegister(s.latency, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), &collector{s})
}

// collector reads the core's counters when it is asked.
type collector struct{ s *Server }

type metric struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*Stats) float64
}

func metrics() []metric {
	count := func(name, help string, of func(*Stats) uint64) metric {
		return metric{"tranche_scheduler_" + name, help, prometheus.CounterValue, func(s *Stats) float64 { return float64(of(s)) }}
	}
	gauge := func(name, help string, of func(*Stats) int) metric {
		return metric{"tranche_scheduler_" + name, help, prometheus.GaugeValue, func(s *Stats) float64 { return float64(of(s)) }}
	}
	return []metric{
		count("filters_total", "Pods for which nodes were asked.", func(s *Stats) uint64 { return s.Filters }),
		count("filters_empty_total", "Of those, pods that no node had room for.", func(s *Stats) uint64 { return s.FilterEmpty }),
		count("decisions_total", "Pods for which nodes were ranked.", func(s *Stats) uint64 { return s.Prioritized }),
		count("holds_total", "GPUs held for a pod before its bind.", func(s *Stats) uint64 { return s.Holds }),
		count("holds_kept_total", "Pods bound where their GPUs were held.", func(s *Stats) uint64 { return s.HoldsKept }),
		count("holds_mismatched_total", "Pods bound elsewhere: kube-scheduler's own scores won.", func(s *Stats) uint64 { return s.HoldsMismatched }),
		count("holds_taken_total", "Holds that another pod's bind took.", func(s *Stats) uint64 { return s.HoldsTaken }),
		count("holds_expired_total", "Holds for which no bind came.", func(s *Stats) uint64 { return s.HoldsExpired }),
		count("binds_total", "Bindings sent.", func(s *Stats) uint64 { return s.Binds }),
		count("bind_failures_total", "Binds that failed.", func(s *Stats) uint64 { return s.BindFailed }),
		count("bind_unsure_total", "Bindings without an answer.", func(s *Stats) uint64 { return s.BindUnsure }),
		count("bind_conflicts_total", "Binds that found their node's GPUs held by others.", func(s *Stats) uint64 { return s.BindConflicts }),
		count("quota_refusals_total", "Nodes refused to a pod by its namespace's quota.", func(s *Stats) uint64 { return s.QuotaRefused }),
		count("preemptions_total", "Preemptions that kube-scheduler asked about.", func(s *Stats) uint64 { return s.Preemptions }),
		count("evictions_total", "Pods for which others were evicted.", func(s *Stats) uint64 { return s.Evictions }),
		gauge("nodes", "Nodes with GPUs.", func(s *Stats) int { return s.Nodes }),
		gauge("nodes_without_inventory", "Of those, nodes whose totals are divided evenly.", func(s *Stats) int { return s.NodesWithoutInventory }),
		gauge("pods", "Pods with GPUs that are known.", func(s *Stats) int { return s.Pods }),
		gauge("pods_unplaced", "Bound pods whose GPUs are not known.", func(s *Stats) int { return s.Unplaced }),
	}
}

func phases() *prometheus.Desc {
	return prometheus.NewDesc("tranche_scheduler_reservations", "Pods by how firm their GPUs are.", []string{"phase"}, nil)
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics() {
		ch <- prometheus.NewDesc(m.name, m.help, nil, nil)
	}
	ch <- phases()
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	stats := c.s.core.Stats()
	for _, m := range metrics() {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(m.name, m.help, nil, nil), m.kind, m.value(&stats))
	}
	for phase, n := range stats.Phases {
		ch <- prometheus.MustNewConstMetric(phases(), prometheus.GaugeValue, float64(n), phase)
	}
}

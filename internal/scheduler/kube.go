package scheduler

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quota"
)

// kube is the API server, for the server and the core.
type kube struct {
	client  kubernetes.Interface
	names   podspec.Names
	log     *slog.Logger
	pods    cache.SharedIndexInformer
	budgets policylisters.PodDisruptionBudgetLister
	events  record.EventRecorder
	synced  []cache.InformerSynced
	start   []func(stop <-chan struct{})
	stop    func()
}

// component is the name in events and leases.
const component = "tranche-scheduler"

// running selects pods that have not ended: those that have hold nothing.
const running = "status.phase!=Succeeded,status.phase!=Failed"

// newKube prepares watches that feed the core. labels are those of nodes that count for quotas.
func newKube(client kubernetes.Interface, core *Core, config *Config) (*kube, error) {
	k := &kube{client: client, names: core.config.Names, log: config.Log}
	pods := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(k.slimPod),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = running }))
	k.pods = pods.Core().V1().Pods().Informer()
	k.start = append(k.start, pods.Start)
	if err := k.watch(k.pods, cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { onPod(o, core.PodSeen) },
		UpdateFunc: func(_, o any) { onPod(o, core.PodSeen) },
		DeleteFunc: func(o any) { onPod(o, func(p *corev1.Pod) { core.PodGone(p.UID) }) },
	}); err != nil {
		return nil, err
	}
	nodes := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(k.slimNode(core.config)))
	k.start = append(k.start, nodes.Start)
	seen := func(o any) {
		if n, ok := o.(*corev1.Node); ok {
			core.NodeSeen(n)
		}
	}
	if err := k.watch(nodes.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: seen, UpdateFunc: func(_, o any) { seen(o) },
		DeleteFunc: func(o any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(o); err == nil {
				core.NodeGone(key)
			}
		},
	}); err != nil {
		return nil, err
	}
	budgets := informers.NewSharedInformerFactory(client, 0)
	k.budgets = budgets.Policy().V1().PodDisruptionBudgets().Lister()
	k.synced = append(k.synced, budgets.Policy().V1().PodDisruptionBudgets().Informer().HasSynced)
	k.start = append(k.start, budgets.Start)
	if config.QuotaName != "" {
		if err := k.watchQuotas(core, config); err != nil {
			return nil, err
		}
	}
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcore.EventSinkImpl{Interface: client.CoreV1().Events("")})
	k.events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component})
	k.stop = broadcaster.Shutdown
	return k, nil
}

func (k *kube) watch(i cache.SharedIndexInformer, h cache.ResourceEventHandler) error {
	r, err := i.AddEventHandler(h)
	if err != nil {
		return err
	}
	k.synced = append(k.synced, r.HasSynced)
	return nil
}

// onPod calls for a pod of an event, that of a deletion that was missed included.
func onPod(o any, call func(*corev1.Pod)) {
	if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = d.Obj
	}
	if p, ok := o.(*corev1.Pod); ok {
		call(p)
	}
}

// watchQuotas keeps the core's quotas as the ConfigMap has them. Without one there are none; one that cannot be
// read leaves the last in force.
func (k *kube) watchQuotas(core *Core, config *Config) error {
	core.SetQuotas(nil, true)
	f := informers.NewSharedInformerFactoryWithOptions(k.client, 0, informers.WithNamespace(config.QuotaNamespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("metadata.name", config.QuotaName).String()
		}))
	k.start = append(k.start, f.Start)
	read := func(o any) {
		m, ok := o.(*corev1.ConfigMap)
		if !ok {
			return
		}
		q, err := quota.Parse(m.Data)
		if err != nil {
			k.log.Error("quotas cannot be read; the last ones stay in force", "configmap", m.Namespace+"/"+m.Name, "err", err)
			k.events.Event(m, corev1.EventTypeWarning, "QuotaUnreadable", err.Error())
			return
		}
		core.SetQuotas(q, false)
	}
	informer := f.Core().V1().ConfigMaps().Informer()
	if err := k.watch(informer, cache.ResourceEventHandlerFuncs{AddFunc: read, UpdateFunc: func(_, o any) { read(o) },
		DeleteFunc: func(any) { core.SetQuotas(nil, false) }}); err != nil {
		return err
	}
	k.synced = append(k.synced, func() bool {
		if !informer.HasSynced() {
			return false
		}
		if len(informer.GetStore().ListKeys()) == 0 {
			core.NoQuotas()
		}
		return true
	})
	return nil
}

// run starts the watches and returns when the core has heard of everything that is there.
func (k *kube) run(ctx context.Context) error {
	for _, start := range k.start {
		start(ctx.Done())
	}
	if !cache.WaitForCacheSync(ctx.Done(), k.synced...) {
		return fmt.Errorf("nodes and pods were not read: %w", context.Cause(ctx))
	}
	return nil
}

// slimPod drops what the core does not look at: tens of thousands of pods are kept.
func (k *kube) slimPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	out := &corev1.Pod{}
	out.Namespace, out.Name, out.UID, out.ResourceVersion, out.DeletionTimestamp = p.Namespace, p.Name, p.UID, p.ResourceVersion, p.DeletionTimestamp
	out.Spec.NodeName, out.Spec.Priority, out.Spec.PreemptionPolicy, out.Spec.Overhead = p.Spec.NodeName, p.Spec.Priority, p.Spec.PreemptionPolicy, p.Spec.Overhead
	out.Status.Phase = p.Status.Phase
	wants := podspec.Wants(p, k.names)
	slim := func(list []corev1.Container) []corev1.Container {
		var to []corev1.Container
		for i := range list {
			c := corev1.Container{RestartPolicy: list[i].RestartPolicy}
			c.Resources.Requests = keep(list[i].Resources.Requests, corev1.ResourceCPU, corev1.ResourceMemory)
			if wants {
				c.Name = list[i].Name
				c.Resources.Limits = keep(list[i].Resources.Limits, corev1.ResourceName(k.names.Core()), corev1.ResourceName(k.names.Memory()))
			}
			to = append(to, c)
		}
		return to
	}
	out.Spec.Containers, out.Spec.InitContainers = slim(p.Spec.Containers), slim(p.Spec.InitContainers)
	if wants {
		out.Status.StartTime, out.Labels = p.Status.StartTime, p.Labels
		for key, v := range p.Annotations {
			if strings.HasPrefix(key, "tranche.dev/") || strings.HasPrefix(key, k.names.Domain+"/") {
				metav1.SetMetaDataAnnotation(&out.ObjectMeta, key, v)
			}
		}
	}
	return out, nil
}

func keep(from corev1.ResourceList, names ...corev1.ResourceName) corev1.ResourceList {
	var out corev1.ResourceList
	for _, name := range names {
		if q, ok := from[name]; ok {
			if out == nil {
				out = corev1.ResourceList{}
			}
			out[name] = q
		}
	}
	return out
}

func (k *kube) slimNode(config CoreConfig) cache.TransformFunc {
	return func(o any) (any, error) {
		n, ok := o.(*corev1.Node)
		if !ok {
			return o, nil
		}
		out := &corev1.Node{}
		out.Name, out.UID, out.ResourceVersion = n.Name, n.UID, n.ResourceVersion
		for _, key := range []string{config.ModelLabel, config.PoolLabel} {
			if v, ok := n.Labels[key]; ok {
				metav1.SetMetaDataLabel(&out.ObjectMeta, key, v)
			}
		}
		if v, ok := n.Annotations[podspec.Inventory]; ok {
			metav1.SetMetaDataAnnotation(&out.ObjectMeta, podspec.Inventory, v)
		}
		out.Status.Capacity = keep(n.Status.Capacity, corev1.ResourceName(config.Names.Core()), corev1.ResourceName(config.Names.Memory()))
		out.Status.Allocatable = keep(n.Status.Allocatable, corev1.ResourceCPU, corev1.ResourceMemory)
		return out, nil
	}
}

// list reads all pods from the API server, not from a cache.
func (k *kube) list(ctx context.Context) ([]corev1.Pod, error) {
	var out []corev1.Pod
	o := metav1.ListOptions{FieldSelector: running, Limit: 1000}
	for {
		page, err := k.client.CoreV1().Pods("").List(ctx, o)
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			slim, err := k.slimPod(&page.Items[i])
			if err != nil {
				return nil, err
			}
			if p, ok := slim.(*corev1.Pod); ok {
				out = append(out, *p)
			}
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return out, nil
		}
	}
}

// Pod implements API.
func (k *kube) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	p, err := k.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return p, err
}

// Bind implements API.
func (k *kube) Bind(ctx context.Context, b Binding) error {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	return k.client.CoreV1().RESTClient().Post().Namespace(b.Namespace).Resource("pods").Name(b.Name).SubResource("binding").
		Timeout(BindTimeout).
		VersionedParams(&metav1.CreateOptions{}, scheme.ParameterCodec).
		Body(&corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: b.Name, UID: b.UID, Annotations: b.Annotations},
			Target:     corev1.ObjectReference{Kind: "Node", Name: b.Node},
		}).Do(ctx).Error()
}

// Event implements API.
func (k *kube) Event(pod types.NamespacedName, uid types.UID, text string) {
	text = podspec.Cut(text, 1000) // the API server takes 1024
	k.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: uid}, corev1.EventTypeWarning, "NoGPURoom", text)
}

// Violations implements API. A pod under several budgets is never evicted: the API refuses that.
func (k *kube) Violations(pods []types.NamespacedName) int {
	count, used := 0, map[*policyv1.PodDisruptionBudget]int32{}
	for _, name := range pods {
		o, ok, err := k.pods.GetStore().GetByKey(name.String())
		p, isPod := o.(*corev1.Pod)
		if err != nil || !ok || !isPod {
			continue
		}
		budgets, err := k.budgets.PodDisruptionBudgets(name.Namespace).List(labels.Everything())
		var of []*policyv1.PodDisruptionBudget
		for _, b := range budgets {
			if covers(b, p) {
				of = append(of, b)
			}
		}
		switch {
		case err != nil || len(of) > 1:
			count++
		case len(of) == 1 && used[of[0]] >= of[0].Status.DisruptionsAllowed:
			count++
		case len(of) == 1:
			used[of[0]]++
		}
	}
	return count
}

// covers tells whether a disruption budget is about a pod: as the Eviction API sees it, to which an empty selector is
// every pod of the namespace, and none is no pod.
func covers(b *policyv1.PodDisruptionBudget, p *corev1.Pod) bool {
	s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	return err == nil && s.Matches(labels.Set(p.Labels))
}

// Evict implements API.
func (k *kube) Evict(ctx context.Context, pod types.NamespacedName, uid types.UID) error {
	return k.client.PolicyV1().Evictions(pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}},
	})
}

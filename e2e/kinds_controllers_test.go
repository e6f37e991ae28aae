//go:build e2e && kinds

package e2e

import "maps"

// These kinds need controllers that take minutes to build.
func init() {
	withKinds, withKueue = true, true
	maps.Copy(jobKinds, map[string]jobKind{
		"JobSet": {pods: 2, suspended: true, manifest: `
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec: {replicatedJobs: [{name: node, replicas: 1, template: {spec: {completions: 2, parallelism: 2, template: {spec: POD}}}}]}`},
		"LeaderWorkerSet": {pods: 2, manifest: `
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec: {replicas: 1, leaderWorkerTemplate: {size: 2, workerTemplate: {spec: SERVER}}}`},
		"TrainJob": {pods: 2, manifest: `
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: stand-in, labels: {trainer.kubeflow.org/framework: torch}}
spec:
  mlPolicy: {numNodes: 2, torch: {}}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
            spec: {template: {spec: TRAINER}}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: train}
spec:
  runtimeRef: {kind: TrainingRuntime, name: stand-in}
  trainer: {numNodes: 2}
  runtimePatches:
    - manager: example.com/me
      trainingRuntimeSpec:
        template: {spec: {replicatedJobs: [{name: node, template: {spec: {template: {metadata: {annotations: {evenkeel.dev/profile: default}}}}}}]}}`},
		"RayCluster": {pods: 2, manifest: `
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: train, annotations: {ray.io/overwrite-container-cmd: "true"}}
spec:
  headGroupSpec: {rayStartParams: {}, template: {metadata: {annotations: {evenkeel.dev/profile: default}}, spec: SERVER}}
  workerGroupSpecs:
    - {groupName: workers, replicas: 1, minReplicas: 1, maxReplicas: 1, rayStartParams: {}, template: {metadata: {annotations: {evenkeel.dev/profile: default}}, spec: SERVER}}`},
		"RayJob": {pods: 2, manifest: `
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: train, annotations: {ray.io/overwrite-container-cmd: "true"}}
spec:
  entrypoint: "true"
  rayClusterSpec:
    headGroupSpec: {rayStartParams: {}, template: {metadata: {annotations: {evenkeel.dev/profile: default}}, spec: SERVER}}
    workerGroupSpecs:
      - {groupName: workers, replicas: 1, minReplicas: 1, maxReplicas: 1, rayStartParams: {}, template: {metadata: {annotations: {evenkeel.dev/profile: default}}, spec: SERVER}}`},
		"Pod group of Kueue": {pods: 2, queued: true, manifest: podGroup},
	})
}

const podGroup = `
apiVersion: kueue.x-k8s.io/v1beta2
kind: AdmissionCheck
metadata: {name: kinds}
spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: kinds}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: kinds}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: kinds}
spec:
  namespaceSelector: {}
  resourceGroups: [{coveredResources: [cpu], flavors: [{name: kinds, resources: [{name: cpu, nominalQuota: 8}]}]}]
  admissionChecksStrategy: {admissionChecks: [{name: kinds}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: team}
spec: {clusterQueue: kinds}
---
apiVersion: v1
kind: Pod
metadata:
  name: train-0
  labels: {kueue.x-k8s.io/queue-name: team, kueue.x-k8s.io/pod-group-name: train}
  annotations: {kueue.x-k8s.io/pod-group-total-count: "2", evenkeel.dev/profile: default}
spec: POD
---
apiVersion: v1
kind: Pod
metadata:
  name: train-1
  labels: {kueue.x-k8s.io/queue-name: team, kueue.x-k8s.io/pod-group-name: train}
  annotations: {kueue.x-k8s.io/pod-group-total-count: "2", evenkeel.dev/profile: default}
spec: POD`

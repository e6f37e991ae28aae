module evenkeel.dev/evenkeel/hack/cluster/tools/volcano

go 1.26.0

require volcano.sh/volcano v1.10.0

module evenkeel.dev/evenkeel/hack/cluster/tools/pause

go 1.26.0

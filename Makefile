# Every target calls one program; `make help` lists them.
.DEFAULT_GOAL := help
GO := go
export GOTOOLCHAIN := local
# Those of all programs, so that what they share is compiled once (hack/cluster/toolbox/build.go).
export GOFLAGS := -trimpath '-gcflags=all=-dwarf=false -l' -gcflags=std=-dwarf=false
export CGO_ENABLED := 0

.PHONY: help
help: ## This list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

.PHONY: demo
demo: ## Annotated PyTorchJobs over Evenkeel on a real cluster (CLUSTER=existing REGISTRY=... for your own; TRAIN=false without PyTorch)
	@echo "compiling the demo (a minute or two the first time)"
	@GOGC=off GOMEMLIMIT=2GiB $(GO) build -o dist/demo ./hack/demo
	@dist/demo --cluster $(or $(CLUSTER),local) $(if $(TRAIN),--train=$(TRAIN)) $(if $(REGISTRY),--registry $(REGISTRY))

.PHONY: check
check: ## What a change most often breaks, in minutes: formatting, vet, clippy, staticcheck, pure tests
	@$(GO) run ./hack/ci/check quick

.PHONY: test
test: ## All tests (root; STAGE="unit operator" for some of them, SINCE=main for what changes since then affect, KUBERNETES=1.30 with STAGE=operator)
	@echo "compiling the test runner (a minute or two the first time)"
	@$(GO) run ./hack/ci/check $(STAGE) $(if $(SINCE),--since $(SINCE)) $(if $(KUBERNETES),--kubernetes $(KUBERNETES)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(FAIL_FAST),--fail-fast)

.PHONY: flakes
flakes: ## Run the tests of stages many times beside load, and list those that ever failed (STAGE=unit N=10 LOAD=5)
	@$(GO) run ./hack/ci/check flakes $(STAGE) $(if $(N),--rounds $(N)) $(if $(LOAD),--load $(LOAD))

.PHONY: test-release
test-release: ## What runs before a release: all tests, and the stages kueue, kinds, torch, aarch64 and walk, which `test` leaves out
	@$(GO) run ./hack/ci/check --all

.PHONY: bench bench-list
bench: ## Measure an experiment into docs/results/ (all of them, or EXPERIMENT=tcp; ROUNDS=5, ONLY=REGEXP, AGAINST=COMMIT, BENCH="--quick"; root for networks)
	$(GO) run ./hack/bench run $(or $(EXPERIMENT),all) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only '$(ONLY)') $(if $(AGAINST),--against $(AGAINST)) $(BENCH)
bench-list: ## The experiments and their cases
	@$(GO) run ./hack/bench list

.PHONY: bench-preflight
bench-preflight: ## Check 5,000 pretend nodes into docs/results/; takes an hour of a quiet machine
	KUBEBUILDER_ASSETS=$$($(GO) run ./hack/cluster tool envtest) $(GO) test ./operator/test/preflight -run '^TestScale$$' -v -timeout 120m \
		-scale 5000 -scale-pods 100000 -scale-run 20s -scale-results docs/results/preflight.md
	KUBEBUILDER_ASSETS=$$($(GO) run ./hack/cluster tool envtest) $(GO) test ./operator/test/integration -run XXX -bench Webhook -benchtime 3000x \
		-webhook-pods 20000 -webhook-results docs/results/preflight.md

.PHONY: soak
soak: ## Many connections under faults for 30 minutes, every byte checked (root; DURATION=2m and SEED=7 for others)
	cd plugin && cargo build --release --locked -p evenkeel-nccl-plugin -p evenkeel-bench
	plugin/target/release/evenkeel-bench soak --plugin $(CURDIR)/plugin/target/release/libnccl_net_evenkeel.so --duration $(or $(DURATION),30m) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: ## Feed each parser of what peers send with inputs that reach new code, 1 minute each (DURATION=2m, TARGET=verdict, PARALLEL=2; INPUT=FILE once)
	@$(GO) run ./hack/ci/fuzz $(if $(DURATION),--duration $(DURATION)) $(if $(TARGET),--target $(TARGET)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(INPUT),--input $(INPUT))

.PHONY: gpu
gpu: ## Real NCCL over the plugin on one GPU, into docs/results/gpu.md (GPU="--quick" for less)
	$(GO) run ./hack/bench run gpu $(GPU)

.PHONY: lint
lint: ## Formatters and linters of every language, and the links of Markdown files
	@$(GO) run ./hack/ci/check lint

.PHONY: docs
docs: ## Write the generated pages of docs/, and build the book with search into dist/docs/
	@$(GO) run ./hack/ci/docs

.PHONY: images images-nccl-tests
images: ## Build the container images with buildah, that of nccl-tests too (NCCL_TESTS=no leaves it out, NCCL_TESTS=DIR has its source)
	$(GO) run ./hack/ci/images all
	$(if $(filter no,$(NCCL_TESTS)),,$(GO) run ./hack/ci/images nccl-tests $(if $(NCCL_TESTS),--source $(NCCL_TESTS)))
images-nccl-tests: ## Build only that of NVIDIA's nccl-tests, from its source and wheels of PyPI (10 to 20 minutes)
	$(GO) run ./hack/ci/images nccl-tests $(if $(NCCL_TESTS),--source $(NCCL_TESTS))

.PHONY: wheel
wheel: ## Build the Python package, with the plugin and evenkeel-run in it, into dist/wheel/
	@$(GO) run ./hack/ci/wheel

.PHONY: release release-verify audit
RELEASE_FLAGS = --version $(VERSION) $(if $(PLATFORMS),--platforms $(PLATFORMS)) $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(DOWNLOADS),--downloads $(DOWNLOADS)) $(if $(NCCL_TESTS),--nccl-tests $(NCCL_TESTS))
release: ## All that a version publishes, into dist/release/VERSION (VERSION=0.1.0; PLATFORMS, REGISTRY, DOWNLOADS, NCCL_TESTS, KEY, KEYLESS=1: docs/releasing.md; root)
	$(GO) run ./hack/ci/release build $(RELEASE_FLAGS) $(if $(KEY),--key $(KEY)) $(if $(KEYLESS),--keyless)
release-verify: ## The same again from a clone elsewhere, compared with dist/release/VERSION byte by byte (VERSION=0.1.0; root)
	$(GO) run ./hack/ci/release verify $(RELEASE_FLAGS)
audit: ## Licences, known vulnerabilities and sources of all dependencies (OFFLINE=1 leaves out the databases of vulnerabilities)
	$(GO) run ./hack/ci/audit $(if $(OFFLINE),--offline)

.PHONY: generate
generate: ## Generated code, manifests (CRDs, deep copies), pages of docs/ and figures of README.md
	$(GO) generate ./...
	$(GO) run ./hack/ci/docs generate
	$(GO) run ./hack/bench readme

.PHONY: cluster-up cluster-down cluster-status
cluster-up: ## Start the local cluster that the demo uses
	$(GO) run ./hack/cluster up --name local
cluster-down: ## Stop it and remove everything it made
	$(GO) run ./hack/cluster down --name local
cluster-status: ## What of it runs
	$(GO) run ./hack/cluster status --name local

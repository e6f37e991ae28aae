# Every target calls one program, and variables choose what it does; `make help` lists them.
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
test: ## All tests (root; STAGE="unit operator" for some, STAGE=all for the long ones too; SINCE=main, KUBERNETES=1.30 with STAGE=operator; ROUNDS=10 LOAD=5 looks for flaky tests)
	@echo "compiling the test runner (a minute or two the first time)"
	@$(GO) run ./hack/ci/check $(if $(ROUNDS),flakes) $(if $(filter all,$(STAGE)),--all,$(STAGE)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(LOAD),--load $(LOAD)) $(if $(SINCE),--since $(SINCE)) $(if $(KUBERNETES),--kubernetes $(KUBERNETES)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(FAIL_FAST),--fail-fast)

.PHONY: bench
bench: ## Measure an experiment into docs/results/ (all of them, or EXPERIMENT=tcp; EXPERIMENT=list names them; ROUNDS=5, ONLY=REGEXP, AGAINST=COMMIT, BENCH="--quick"; root for networks)
ifeq ($(EXPERIMENT),list)
	@$(GO) run ./hack/bench list
else ifeq ($(EXPERIMENT),preflight)
	KUBEBUILDER_ASSETS=$$($(GO) run ./hack/cluster tool envtest) $(GO) test ./operator/test/preflight -run '^TestScale$$' -v -timeout 120m \
		-scale 5000 -scale-pods 100000 -scale-run 20s -scale-results docs/results/preflight.md
	KUBEBUILDER_ASSETS=$$($(GO) run ./hack/cluster tool envtest) $(GO) test ./operator/test/integration -run XXX -bench Webhook -benchtime 3000x \
		-webhook-pods 20000 -webhook-results docs/results/preflight.md
else
	$(GO) run ./hack/bench run $(or $(EXPERIMENT),all) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only '$(ONLY)') $(if $(AGAINST),--against $(AGAINST)) $(BENCH)
endif

.PHONY: soak
soak: ## Many connections under faults for 30 minutes, every byte checked (root; DURATION=2m and SEED=7 for others)
	cd plugin && cargo build --release --locked -p evenkeel-nccl-plugin -p evenkeel-bench
	plugin/target/release/evenkeel-bench soak --plugin $(CURDIR)/plugin/target/release/libnccl_net_evenkeel.so --duration $(or $(DURATION),30m) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: ## Feed each parser of what peers send with inputs that reach new code, 1 minute each (DURATION=2m, TARGET=verdict, PARALLEL=2; INPUT=FILE once)
	@$(GO) run ./hack/ci/fuzz $(if $(DURATION),--duration $(DURATION)) $(if $(TARGET),--target $(TARGET)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(INPUT),--input $(INPUT))

.PHONY: lint
lint: ## Formatters and linters of every language, the width of lines, and the links of Markdown files
	@$(GO) run ./hack/ci/check lint

.PHONY: docs
docs: ## Write the generated pages of docs/, and build the book with search into dist/docs/
	@$(GO) run ./hack/ci/docs

.PHONY: images
images: ## Build the container images with buildah (NCCL_TESTS=no leaves out NVIDIA's nccl-tests, NCCL_TESTS=DIR has its source, NCCL_TESTS=only builds nothing else)
ifneq ($(NCCL_TESTS),only)
	$(GO) run ./hack/ci/images all
endif
ifneq ($(NCCL_TESTS),no)
	$(GO) run ./hack/ci/images nccl-tests $(addprefix --source ,$(filter-out only,$(NCCL_TESTS)))
endif

.PHONY: wheel
wheel: ## Build the Python package, with the plugin and evenkeel-run in it, into dist/wheel/
	@$(GO) run ./hack/ci/wheel

.PHONY: release
release: ## All that a version publishes, into dist/release/VERSION (VERSION=0.1.0; PLATFORMS, REGISTRY, DOWNLOADS, NCCL_TESTS, KEY, KEYLESS=1; VERIFY=1 builds it again and compares; root)
	$(GO) run ./hack/ci/release $(if $(VERIFY),verify,build) --version $(VERSION) $(if $(PLATFORMS),--platforms $(PLATFORMS)) $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(DOWNLOADS),--downloads $(DOWNLOADS)) $(if $(NCCL_TESTS),--nccl-tests $(NCCL_TESTS)) $(if $(KEY),--key $(KEY)) $(if $(KEYLESS),--keyless)

.PHONY: audit
audit: ## Licences, known vulnerabilities and sources of all dependencies (OFFLINE=1 leaves out the databases of vulnerabilities)
	$(GO) run ./hack/ci/audit $(if $(OFFLINE),--offline)

.PHONY: generate
generate: ## Generated code, manifests (CRDs, deep copies), pages of docs/ and figures of README.md
	$(GO) generate ./...
	$(GO) run ./hack/ci/docs generate
	$(GO) run ./hack/bench readme

.PHONY: cluster
cluster: ## The local cluster that the demo uses (ACTION=up, down or status, the default)
	$(GO) run ./hack/cluster $(or $(ACTION),status) --name local

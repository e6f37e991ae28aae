# The operator: webhook and controller in one static binary. `go run ./hack/ci/images dist` puts it into dist/ first.
ARG BASE_IMAGE=gcr.io/distroless/static-debian12:nonroot
FROM ${BASE_IMAGE}
# DIST is the folder of the binaries: dist, or dist/linux-ARCH for another processor.
ARG DIST=dist
COPY ${DIST}/evenkeel-operator /evenkeel-operator
COPY LICENSE /licenses/LICENSE
USER 65532:65532
ENTRYPOINT ["/evenkeel-operator"]

// One rank of an all-reduce by Gloo, timed: what Evenkeel's collectives are measured against.
//
//   driver [--tls CERTIFICATE KEY AUTHORITY] RANK SIZE FOLDER INTERFACE ALGORITHM MILLISECONDS ELEMENTS...
//
// With three PEM files it is over TLS, where the library has that; Debian's has not.
// Rank 0 prints one line for each number of elements: elements, samples, and the minimum and the median time in microseconds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/config.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#if GLOO_HAVE_TRANSPORT_TCP_TLS
#include <gloo/transport/tcp/tls/device.h>
#endif

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point begun) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begun).count();
}

static std::function<void()> operation(const std::string& name, std::shared_ptr<gloo::Context> context,
                                       std::vector<float>& data) {
  const std::vector<float*> pointers{data.data()};
  const int count = static_cast<int>(data.size());
  std::shared_ptr<gloo::Algorithm> algorithm;
  if (name == "ring") {
    algorithm = std::make_shared<gloo::AllreduceRing<float>>(context, pointers, count);
  } else if (name == "ring_chunked") {
    algorithm = std::make_shared<gloo::AllreduceRingChunked<float>>(context, pointers, count);
  } else if (name == "halving_doubling") {
    algorithm = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(context, pointers, count);
  } else if (name == "bcube") {
    algorithm = std::make_shared<gloo::AllreduceBcube<float>>(context, pointers, count);
  } else if (name == "new_ring" || name == "new_bcube") {
    auto options = std::make_shared<gloo::AllreduceOptions>(context);
    options->setAlgorithm(name == "new_ring" ? gloo::AllreduceOptions::Algorithm::RING
                                             : gloo::AllreduceOptions::Algorithm::BCUBE);
    options->setOutput(data.data(), data.size());
    options->setReduceFunction([](void* into, const void* a, const void* b, size_t n) {
      gloo::sum<float>(into, a, b, n);
    });
    return [options] { gloo::allreduce(*options); };
  } else {
    throw std::invalid_argument("no algorithm " + name);
  }
  return [algorithm] { algorithm->run(); };
}

static void measure(int rank, const std::string& name, std::shared_ptr<gloo::Context> context, size_t elements,
                    double microseconds) {
  std::vector<float> data(elements, 1.0f);
  auto once = operation(name, context, data);
  once();
  for (float value : data) {
    if (value != static_cast<float>(context->size)) {
      throw std::runtime_error("a sum is wrong");
    }
  }
  std::fill(data.begin(), data.end(), 0.0f);
  Clock::time_point begun;
  for (int i = 0; i < 5; i++) {
    begun = Clock::now();
    once();
  }
  // Rank 0 decides the number of iterations. It puts the number into an element, to which the others add zero.
  std::vector<float> count(1, rank == 0 ? static_cast<float>(std::clamp(microseconds / since(begun), 3.0, 1e6)) : 0.0f);
  operation("new_ring", context, count)();
  std::vector<double> samples(static_cast<size_t>(count[0]));
  for (double& sample : samples) {
    begun = Clock::now();
    once();
    sample = since(begun);
  }
  std::sort(samples.begin(), samples.end());
  if (rank == 0) {
    std::printf("%zu %zu %.2f %.2f\n", elements, samples.size(), samples[0], samples[samples.size() / 2]);
    std::fflush(stdout);
  }
}

using Device = std::shared_ptr<gloo::transport::Device>;
using Context = gloo::rendezvous::Context;
using Store = gloo::rendezvous::Store;

// Debian's Gloo borrows the store, and newer ones share it.
[[maybe_unused]] static void join(void (Context::*mesh)(Store&, Device&), Context& context, std::shared_ptr<Store> store,
                                     Device device) {
  (context.*mesh)(*store, device);
}

[[maybe_unused]] static void join(void (Context::*mesh)(std::shared_ptr<Store>, Device&), Context& context,
                                     std::shared_ptr<Store> store, Device device) {
  (context.*mesh)(store, device);
}

#if GLOO_HAVE_TRANSPORT_TCP_TLS
// Ranks that are joined over TLS. In Gloo of 2025, connectFullMesh makes connections in clear over a TLS device: the function that
// it calls of TCP's context makes TCP's pairs. The same function of the base class makes the device's.
class TlsContext : public Context {
 public:
  using Context::Context;

  void join(std::shared_ptr<Store> store, Device device) {
    transportContext_ = device->createContext(rank, size);
    transportContext_->setTimeout(getTimeout());
    transportContext_->gloo::transport::Context::createAndConnectAllPairs(store);
    device_ = device;
  }
};
#endif

// All ranks, joined over an interface; files are the certificate, its key and the authority, or null.
static std::shared_ptr<gloo::Context> joined(int rank, int size, std::shared_ptr<Store> store, const char* interface, char** files) {
  gloo::transport::tcp::attr attr;
  attr.iface = interface;
  if (files == nullptr) {
    auto context = std::make_shared<Context>(rank, size);
    join(&Context::connectFullMesh, *context, store, gloo::transport::tcp::CreateDevice(attr));
    return context;
  }
#if GLOO_HAVE_TRANSPORT_TCP_TLS
  auto context = std::make_shared<TlsContext>(rank, size);
  context->join(store, gloo::transport::tcp::tls::CreateDevice(attr, files[1], files[0], files[2], ""));
  return context;
#else
  throw std::runtime_error("this Gloo was built without TLS");
#endif
}

int main(int argc, char** argv) try {
  char** files = nullptr;
  if (argc > 4 && std::strcmp(argv[1], "--tls") == 0) {
    files = argv + 2;
    argc -= 4;
    argv += 4;
  }
  if (argc < 8) {
    std::fprintf(stderr, "usage: driver [--tls CERTIFICATE KEY AUTHORITY] RANK SIZE FOLDER INTERFACE ALGORITHM MILLISECONDS ELEMENTS...\n");
    return 2;
  }
  const int rank = std::atoi(argv[1]);
  const auto store = std::make_shared<gloo::rendezvous::FileStore>(argv[3]);
  const auto context = joined(rank, std::atoi(argv[2]), store, argv[4], files);
  for (int i = 7; i < argc; i++) {
    measure(rank, argv[5], context, std::strtoul(argv[i], nullptr, 10), std::atof(argv[6]) * 1e3);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}

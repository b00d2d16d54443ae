// Runs what `python -m jobkit export RUN --to aoti` wrote, without Python.
//
//   infer FOLDER [--images FILE] [--batch N] [--threads N] [--iterations N] [--jacobian FILE]
// Checks the expected outputs, then classifies the images of a file (3,072 bytes each: red, green
// and blue planes of 32 x 32) or measures a batch: one [METRIC] line per iteration.
// --jacobian writes d logits / d pixels of each image: (classes, 3, 32, 32), fp32.
// Exit codes: 0; 2 wrong usage or a file that cannot be read; 4 outputs differ from the expected.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <malloc.h>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
using Loader = torch::inductor::AOTIModelPackageLoader;
const std::vector<int64_t> kPixels{-1, 3, 32, 32};  // 0 to 255
constexpr double kLogits = 1e-5;    // of the largest logit, or of 1 where all are smaller
constexpr double kJacobian = 1e-3;  // of its 2-norm: ReLU's derivative jumps at 0
struct Options {
  std::string folder, images, jacobian;
  int64_t batch = 1, threads = 1, iterations = 20;
};
static int64_t whole(const std::string& name, const std::string& text) {
  char* end = nullptr;
  if (int64_t n = std::strtoll(text.c_str(), &end, 10); n > 0 && !*end) return n;
  throw std::invalid_argument(name + ": must be 1 or more");
}
static Options read_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    std::string word = argv[i], next = i + 1 < argc ? argv[i + 1] : "";
    if (word == "--batch") o.batch = whole(word, next), i++;
    else if (word == "--threads") o.threads = whole(word, next), i++;
    else if (word == "--iterations") o.iterations = whole(word, next), i++;
    else if (word == "--images" && !next.empty()) o.images = next, i++;
    else if (word == "--jacobian" && !next.empty()) o.jacobian = next, i++;
    else if (word[0] != '-' && o.folder.empty()) o.folder = word;
    else throw std::invalid_argument(word + ": unknown, or without its value");
  }
  if (o.folder.empty()) throw std::invalid_argument("give the folder of an export");
  return o;
}
static std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string found((std::istreambuf_iterator<char>(file)), {});
  if (!file || found.empty()) throw std::invalid_argument(path + ": cannot be read, or empty");
  return found;
}
static int64_t largest_batch(const std::string& folder) {
  std::string text = bytes_of(folder + "/manifest.json"), key = "\"max_batch\":";
  if (size_t at = text.find(key); at != text.npos) return std::stoll(text.substr(at + key.size()));
  throw std::invalid_argument(folder + ": no export --to aoti");
}
static at::Tensor fp32_of(const std::string& path, at::ScalarType type, at::IntArrayRef shape) try {
  std::string raw = bytes_of(path);  // becomes fp32; -1 in the shape: as many as there are
  int64_t count = raw.size() / c10::elementSize(type);
  return at::from_blob(raw.data(), {count}, type).to(at::kFloat, false, true).reshape(shape);
} catch (const c10::Error&) {
  throw std::invalid_argument(c10::str(path, ": its size does not fit the shape ", shape));
}
static at::Tensor run(Loader& with, const at::Tensor& x, int64_t most) {  // at most so many at once
  std::vector<at::Tensor> parts = x.split(most);
  for (at::Tensor& part : parts) part = with.run({part.contiguous()})[0];
  return parts.size() > 1 ? at::cat(parts) : parts[0];
}
static bool agrees(const char* what, const at::Tensor& off, double most) {  // false for NaN
  printf("%s: largest difference %.3g of %.3g allowed\n", what, off.item<double>(), most);
  return off.item<double>() <= most;
}

static int infer(const Options& o) {
  // Keep freed memory: to get it from the kernel again takes a third of the time of a large batch.
  mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1);
  at::set_num_threads(int(o.threads));
  int64_t most = largest_batch(o.folder);
  if (o.batch > most) throw std::invalid_argument("--batch: at most " + std::to_string(most));
  c10::InferenceMode guard;
  at::Tensor eight = fp32_of(o.folder + "/images.u8", at::kByte, kPixels);
  at::Tensor images = o.images.empty() ? eight : fp32_of(o.images, at::kByte, kPixels);
  at::Tensor expected = fp32_of(o.folder + "/expected.f32", at::kFloat, {eight.size(0), -1});
  Loader loader(o.folder + "/model.pt2");
  at::Tensor off = (run(loader, eight, most) - expected).abs().max();
  if (!agrees("logits", off / expected.abs().max().clamp_min(1), kLogits)) return 4;
  if (!o.jacobian.empty()) {
    Loader derivative(o.folder + "/jacobian.pt2");
    at::Tensor want = fp32_of(o.folder + "/jacobian.f32", at::kFloat, {-1});
    at::Tensor found = run(derivative, eight.slice(0, 0, 1), 1).flatten();
    if (!agrees("jacobian", (found - want).norm() / want.norm(), kJacobian)) return 4;
    std::ofstream file(o.jacobian, std::ios::binary);
    for (const at::Tensor& image : images.split(1))
      if (found = run(derivative, image, 1).contiguous();
          !file.write(static_cast<const char*>(found.const_data_ptr()), found.nbytes()).flush())
        throw std::invalid_argument(o.jacobian + ": cannot be written");
  }
  if (!o.images.empty()) {
    for (long i = 0; const at::Tensor& one : run(loader, images, most).argmax(1).unbind())
      printf("image %ld: class %ld\n", i++, long(one.item<int64_t>()));
    return 0;
  }
  at::Tensor x = eight.repeat({(o.batch + 7) / 8, 1, 1, 1}).slice(0, 0, o.batch).contiguous();
  for (int64_t i = 0; i < 3 + o.iterations; i++) {  // the first three are a warm-up
    auto begin = std::chrono::steady_clock::now();
    run(loader, x, most);
    double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (i >= 3)
      printf("[METRIC] step=%ld step_time_ms=%.6f images_per_s=%.3f batch=%ld threads=%ld\n",
             long(i - 3), s * 1e3, o.batch / s, long(o.batch), long(o.threads));
  }
  return 0;
}

int main(int argc, char** argv) try {
  return infer(read_options(argc, argv));
} catch (const std::exception& error) {  // torch's own have many lines
  fprintf(stderr, "infer: error: %.*s\n", int(strcspn(error.what(), "\n")), error.what());
  return 2;
}

// Runs a script of calls of the kernels and checks what they compute: without Python, so that it runs under emulators.
//
// driver LIBRARY SCRIPT. A script (script.py writes it) holds buffers with the bytes and addresses that they begin with,
// then steps: calls, and comparisons of buffers. Exit code 0 if all comparisons hold, 1 if some do not, 2 if it cannot run.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace {

enum Step : int64_t { kCall, kClose, kSame };
enum Argument : int64_t { kNumber, kAddress };

[[noreturn]] void fail(const std::string& reason) {
  std::fprintf(stderr, "driver: %s\n", reason.c_str());
  std::exit(2);
}

void* function_of(const char* path, const char* name) {
#if defined(_WIN32)
  static const HMODULE library = LoadLibraryA(path);
  if (!library) fail(std::string("cannot load ") + path + ": error " + std::to_string(GetLastError()));
  void* found = (void*)GetProcAddress(library, name);
#else
  static void* const library = dlopen(path, RTLD_NOW);
  if (!library) fail(std::string("cannot load ") + path + ": " + dlerror());
  void* found = dlsym(library, name);
#endif
  if (!found) fail(std::string("the library has no ") + name);
  return found;
}

class Script {
 public:
  explicit Script(const char* path) : file_(std::fopen(path, "rb")) {
    if (!file_) fail(std::string("cannot read ") + path);
  }

  int64_t number() {
    int64_t found;
    take(&found, sizeof found);
    return found;
  }

  std::string text() {
    std::string found(size_t(number()), ' ');
    take(&found[0], found.size());
    return found;
  }

  void take(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, file_) != bytes) fail("the script ends too early");
  }

  void read_buffers() {
    std::vector<int64_t> places;  // buffer, offset, buffer and offset that it points to
    buffers_.resize(size_t(number()));
    for (size_t index = 0; index < buffers_.size(); ++index) {
      const int64_t bytes = number();
      char* memory = (char*)std::malloc(size_t(bytes) + 128);  // begins where a line of the cache does
      buffers_[index] = memory + (64 - uintptr_t(memory) % 64);
      take(buffers_[index], size_t(bytes));
      for (int64_t count = number(); count > 0; --count) {
        places.push_back(int64_t(index));
        for (int each = 0; each < 3; ++each) places.push_back(number());
      }
    }
    for (size_t at = 0; at < places.size(); at += 4) {
      const char* target = buffers_[size_t(places[at + 2])] + places[at + 3];
      std::memcpy(buffers_[size_t(places[at])] + places[at + 1], &target, sizeof target);
    }
  }

  char* address() {
    const int64_t buffer = number();
    return buffers_[size_t(buffer)] + number();
  }

  // Arguments are integers and addresses: as 64-bit words they are passed alike on all platforms that this runs on.
  void call(const char* library) {
    const std::string name = text();
    int64_t words[12] = {};
    const int64_t count = number();
    for (int64_t index = 0; index < count; ++index) {
      words[index] = number() == kNumber ? number() : int64_t(uintptr_t(address()));
    }
    typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
    const int64_t* w = words;
    const int64_t result = ((Function)function_of(library, name.c_str()))(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9]);
    if (number()) std::memcpy(address(), &result, sizeof result);
  }

  // Whether numbers are as expected, within a share of the largest of them.
  bool compare(const std::string& label, const char* found, const char* expected, int64_t count, double share) {
    double most = 0, off = 0;
    for (int64_t index = 0; index < count; ++index) {
      float one, other;
      std::memcpy(&one, found + index * sizeof one, sizeof one), std::memcpy(&other, expected + index * sizeof other, sizeof other);
      most = std::fmax(most, std::fabs(double(other)));
      const double apart = std::fabs(double(one) - double(other));
      if (one != other && !(apart <= off) && !std::isnan(off)) off = apart;
    }
    const bool holds = off <= share * most;
    if (!holds) std::printf("%s: off by %g, largest %g\n", label.c_str(), off, most);
    return holds;
  }

  bool check(Step kind) {
    const std::string label = text();
    const char *found = address(), *expected = address();
    const int64_t count = number();
    if (kind == kSame) {
      const bool holds = std::memcmp(found, expected, size_t(count)) == 0;
      if (!holds) std::printf("%s: other bytes\n", label.c_str());
      return holds;
    }
    double share;
    take(&share, sizeof share);
    return compare(label, found, expected, count, share);
  }

 private:
  std::FILE* file_;
  std::vector<char*> buffers_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) fail("use: driver LIBRARY SCRIPT");
  Script script(arguments[2]);
  script.read_buffers();
  int calls = 0, checks = 0, failures = 0;
  for (int64_t left = script.number(); left > 0; --left) {
    const Step kind = Step(script.number());
    if (kind == kCall) script.call(arguments[1]), ++calls;
    else failures += !script.check(kind), ++checks;
  }
  std::printf("%d calls, %d checks, %d failures\n", calls, checks, failures);
  std::fflush(stdout);
  return failures > 0;
}

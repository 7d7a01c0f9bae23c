// The few names of GoogleTest that tests/cpp/cuda uses, with their meanings, for machines that lack it: `make gpu-check`
// compiles those tests with this folder on the include path and main() below. CMake takes GoogleTest itself.
// Arguments: parts of test names; without any, all run; --list prints the names instead. Exit code 1 if a test failed or
// none was chosen.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace testing {

class Test {
 public:
  virtual ~Test() = default;
  virtual void SetUp() {}
  virtual void TestBody() = 0;
  static bool HasFailure();
};

struct Case {
  const char* name;
  Test* (*make)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline bool add(const char* name, Test* (*make)()) {
  cases().push_back({name, make});
  return true;
}

struct State {
  bool failed = false, skipped = false;
};
inline State& state() {
  static State of_this_test;
  return of_this_test;
}

inline bool Test::HasFailure() { return state().failed; }

// What follows a macro's `<<`; the finding is printed when it is complete.
class Finding {
 public:
  Finding(const char* file, int line, const char* what) {
    text_ << file << ":" << line << ": " << what << " ";
  }
  ~Finding() { std::printf("  %s\n", text_.str().c_str()); }
  template <class T>
  Finding& operator<<(const T& part) {
    text_ << part;
    return *this;
  }

 private:
  std::ostringstream text_;
};
// Makes `return Leave() = Finding() << ...` a statement of a void function.
struct Leave {
  void operator=(const Finding&) const {}
};

inline int run_all(int count, char** names) {
  if (count == 1 && std::strcmp(names[0], "--list") == 0) {
    for (const Case& each : cases()) std::printf("%s\n", each.name);
    return 0;
  }
  int failed = 0, skipped = 0, run = 0;
  for (const Case& each : cases()) {
    bool chosen = count == 0;
    for (int i = 0; i < count; ++i) chosen = chosen || std::strstr(each.name, names[i]) != nullptr;
    if (!chosen) continue;
    state() = {};
    Test* test = each.make();
    test->SetUp();
    if (!state().skipped && !state().failed) test->TestBody();
    delete test;
    const char* verdict = state().failed ? "FAILED" : state().skipped ? "SKIPPED" : "passed";
    std::printf("%s %s\n", verdict, each.name);
    std::fflush(stdout);
    ++run;
    failed += state().failed;
    skipped += state().skipped;
  }
  std::printf("%d tests, %d failed, %d skipped\n", run, failed, skipped);
  return failed > 0 || run == 0;
}

}  // namespace testing

#define TEST_F(Fixture, Name)                                                                    \
  struct Fixture##_##Name : Fixture {                                                            \
    void TestBody() override;                                                                    \
  };                                                                                             \
  [[maybe_unused]] static const bool added_##Fixture##_##Name =                                  \
      testing::add(#Fixture "." #Name, []() -> testing::Test* { return new Fixture##_##Name; }); \
  void Fixture##_##Name::TestBody()

#define GOSSAMER_FOUND(what) (testing::state().failed = true, testing::Finding(__FILE__, __LINE__, what))
#define ASSERT_TRUE(condition) \
  if (condition) {             \
  } else                       \
    return testing::Leave() = GOSSAMER_FOUND(#condition)
#define ASSERT_EQ(one, other) ASSERT_TRUE((one) == (other))
#define EXPECT_EQ(one, other) \
  if ((one) == (other)) {     \
  } else                      \
    GOSSAMER_FOUND(#one " == " #other)
#define GTEST_SKIP() \
  return testing::state().skipped = true, testing::Leave() = testing::Finding(__FILE__, __LINE__, "skipped:")

int main(int count, char** names) { return testing::run_all(count - 1, names + 1); }

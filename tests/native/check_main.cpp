#include "check.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace check {

namespace {

std::atomic<int>          n_failed{0};
std::atomic<const char *> running{nullptr};

// A program that hangs names the test, a little before LS_TEST_SECONDS are over.
void watch() {
    const char * limit = getenv("LS_TEST_SECONDS");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(limit ? atoi(limit) : 300) - std::chrono::seconds(5);
    while (std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    fprintf(stderr, "HANGS  %s\n", running.load() ? running.load() : "(at the end)");
    fflush(stderr);
    abort(); // a core dump shows where
}

bool wanted(const char * name, int argc, char ** argv) {
    return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char * a) { return strcmp(a, name) == 0; });
}

// true: it ran to its end
bool run(const Case & c) {
    running = c.name;
    const int before = n_failed;
    const auto begin = std::chrono::steady_clock::now();
    bool ran = true;
    try {
        c.run();
    } catch (const Stop &) {
    } catch (const Skip & s) {
        printf("skip   %s: %s\n", c.name, s.reason.c_str());
        ran = false;
    } catch (const std::exception & e) {
        failed(c.name, 0, std::string("unexpected exception: ") + e.what());
    }
    running = nullptr;
    if (ran) {
        const std::chrono::duration<double> t = std::chrono::steady_clock::now() - begin;
        printf("%s %s (%.2f s)\n", n_failed == before ? "ok    " : "FAILED", c.name, t.count());
    }
    fflush(stdout);
    return ran;
}

} // namespace

std::vector<Case> & cases() {
    static std::vector<Case> all;
    return all;
}

bool add(const char * name, void (*run)()) {
    cases().push_back({name, run});
    return true;
}

void failed(const char * file, int line, const std::string & what) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    n_failed++;
    printf("%s:%d: %s\n", file, line, what.c_str());
    fflush(stdout);
}

} // namespace check

int main(int argc, char ** argv) {
    std::thread(check::watch).detach();
    int n_ran = 0, n_skipped = 0;
    for (const check::Case & c : check::cases()) {
        if (check::wanted(c.name, argc, argv)) {
            (check::run(c) ? n_ran : n_skipped)++;
        }
    }
    printf("%d ran, %d skipped, %d checks failed\n", n_ran, n_skipped, check::n_failed.load());
    if (n_ran == 0) {
        return n_skipped ? 77 : 1;
    }
    return check::n_failed ? 1 : 0;
}

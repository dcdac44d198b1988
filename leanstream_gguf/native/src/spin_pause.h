// Between two looks at what another thread is about to finish: lets the other half of the core work.
#pragma once

#if defined(_MSC_VER)
#  include <intrin.h>
#endif

namespace ls {

inline void spin_pause() {
#if defined(_MSC_VER) && defined(_M_X64)
    _mm_pause();
#elif defined(_MSC_VER) && defined(_M_ARM64)
    __yield();
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ volatile("yield");
#endif
}

} // namespace ls

# How many leading tokens two runs share, with the widest instructions this machine has. Owns no state.
#
# The kernel is picked once, when a module is loaded, by what the processor says it can do; so one build serves all,
# also under valgrind, which knows no AVX-512. `kernel_name` says which it was.

from libc.stdint cimport int32_t, uint32_t

cdef extern from * nogil:
    """
    #if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    #define PREBLE_X86 1
    #include <immintrin.h>
    #endif

    typedef uint32_t (*preble_kernel)(const int32_t *, const int32_t *, uint32_t);

    static uint32_t preble_common_plain(const int32_t *a, const int32_t *b, uint32_t count) {
        uint32_t i = 0;
        while (i + 64 <= count && memcmp(a + i, b + i, 256) == 0) i += 64;
        while (i < count && a[i] == b[i]) i++;
        return i;
    }

    #ifdef PREBLE_X86
    __attribute__((target("avx2")))
    static uint32_t preble_common_avx2(const int32_t *a, const int32_t *b, uint32_t count) {
        uint32_t i = 0;
        #define PREBLE_DIFFERENCE(at) _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(a + (at))), \\
                                                       _mm256_loadu_si256((const __m256i *)(b + (at))))
        for (; i + 32 <= count; i += 32) {
            __m256i low = _mm256_or_si256(PREBLE_DIFFERENCE(i), PREBLE_DIFFERENCE(i + 8));
            __m256i high = _mm256_or_si256(PREBLE_DIFFERENCE(i + 16), PREBLE_DIFFERENCE(i + 24));
            __m256i any = _mm256_or_si256(low, high);
            if (!_mm256_testz_si256(any, any)) break;
        }
        for (; i + 8 <= count; i += 8) {
            __m256i equal = _mm256_cmpeq_epi32(PREBLE_DIFFERENCE(i), _mm256_setzero_si256());
            uint32_t differ = ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(equal)) & 0xFF;
            if (differ) return i + __builtin_ctz(differ);
        }
        #undef PREBLE_DIFFERENCE
        while (i < count && a[i] == b[i]) i++;
        return i;
    }

    __attribute__((target("avx512f")))
    static uint32_t preble_common_avx512(const int32_t *a, const int32_t *b, uint32_t count) {
        uint32_t i = 0;
        #define PREBLE_DIFFERENCE(at) _mm512_xor_si512(_mm512_loadu_si512(a + (at)), _mm512_loadu_si512(b + (at)))
        for (; i + 64 <= count; i += 64) {
            __m512i low = _mm512_or_si512(PREBLE_DIFFERENCE(i), PREBLE_DIFFERENCE(i + 16));
            __m512i high = _mm512_or_si512(PREBLE_DIFFERENCE(i + 32), PREBLE_DIFFERENCE(i + 48));
            __m512i any = _mm512_or_si512(low, high);
            if (_mm512_test_epi32_mask(any, any)) break;
        }
        #undef PREBLE_DIFFERENCE
        while (i < count) {
            uint32_t left = count - i;
            __mmask16 lanes = left < 16 ? (__mmask16)((1u << left) - 1) : (__mmask16)0xFFFF;
            __mmask16 differ = _mm512_cmpneq_epi32_mask(_mm512_maskz_loadu_epi32(lanes, a + i),
                                                        _mm512_maskz_loadu_epi32(lanes, b + i));
            if (differ) return i + __builtin_ctz(differ);
            i += left < 16 ? left : 16;
        }
        return count;
    }
    #endif

    enum { PREBLE_KERNELS = 3 };
    static const char *const preble_kernel_names[PREBLE_KERNELS] = {"plain", "avx2", "avx512"};

    /* The kernels from plain to wide; NULL for what this machine cannot run. */
    static preble_kernel preble_kernel_at(int width) {
    #ifdef PREBLE_X86
        __builtin_cpu_init();
        if (width == 1) return __builtin_cpu_supports("avx2") ? preble_common_avx2 : NULL;
        if (width == 2) return __builtin_cpu_supports("avx512f") ? preble_common_avx512 : NULL;
    #endif
        return width == 0 ? preble_common_plain : NULL;
    }

    static preble_kernel preble_common = preble_common_plain;
    static const char *preble_kernel_name = "plain";

    #ifdef PREBLE_X86
    __attribute__((constructor)) static void preble_pick_kernel(void) {
        for (int width = 0; width < PREBLE_KERNELS; width++) {
            if (preble_kernel_at(width) == NULL) continue;
            preble_common = preble_kernel_at(width);
            preble_kernel_name = preble_kernel_names[width];
        }
    }
    #endif
    """
    ctypedef uint32_t (*Kernel "preble_kernel")(const int32_t* a, const int32_t* b, uint32_t count) noexcept nogil
    uint32_t common_prefix "preble_common"(const int32_t* a, const int32_t* b, uint32_t count)
    int KERNELS "PREBLE_KERNELS"
    Kernel kernel_at "preble_kernel_at"(int width)           # tests: each that this machine can run, or NULL
    const char** kernel_names "preble_kernel_names"
    const char* kernel_name "preble_kernel_name"

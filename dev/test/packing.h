// packing.h: texts packed as gzip and zstd do, for tests.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <string>

inline std::string gzip(const std::string& text) {
    constexpr int LEVEL = 6, WINDOW_BITS_GZIP = 15 + 16, MEMORY_LEVEL = 8;
    z_stream z = {};
    deflateInit2(&z, LEVEL, Z_DEFLATED, WINDOW_BITS_GZIP, MEMORY_LEVEL, Z_DEFAULT_STRATEGY);
    std::string out(text.size() + 1000, '\0');
    z.next_in = (Bytef*)text.data();
    z.avail_in = text.size();
    z.next_out = (Bytef*)out.data();
    z.avail_out = out.size();
    EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
    out.resize(z.total_out);
    deflateEnd(&z);
    return out;
}

// As the library does by default, or with a checksum at the end, as the program does.
inline std::string zstd(const std::string& text, int checksum = 0) {
    ZSTD_CCtx* context = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, checksum);
    std::string out(ZSTD_compressBound(text.size()), '\0');
    out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
    ZSTD_freeCCtx(context);
    return out;
}

// shard.h: token ids on disk, in llm.c's shard format, and the side file PREFIX.json that ./tokenize writes next to them.
// A shard is 256 int32 (magic, version, number of tokens, zeros), then the ids as uint16 or uint32; all little-endian.
#pragma once

#include <sys/resource.h>
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <optional>
#include <span>

#include "llmc/base.h"

static_assert(std::endian::native == std::endian::little, "shards are read as they lie on disk, which is little-endian");

struct ShardHeader {
    int32_t magic, version, tokens;
    int32_t zero[253];
};
constexpr i64 SHARD_HEADER_BYTES = 1024;
static_assert(sizeof(ShardHeader) == SHARD_HEADER_BYTES);

struct ShardFormat {
    int32_t magic, version;
    int bytes_per_token;
};
constexpr ShardFormat SHARD_16_BIT = {20240520, 1, 2};  // llm.c's "gpt-2"
constexpr ShardFormat SHARD_32_BIT = {20240801, 7, 4};  // llm.c's "llama-3"

constexpr i64 SHARD_MAX_TOKENS = std::numeric_limits<int32_t>::max();  // the header counts in int32
constexpr i64 SHARD_16_BIT_MAX_VOCAB = 65536;

inline ShardFormat shard_format(i64 vocab) { return vocab <= SHARD_16_BIT_MAX_VOCAB ? SHARD_16_BIT : SHARD_32_BIT; }

// ---------------------------------------------------------------------------------------------------------------
// What people pass by mistake, recognised by its first bytes so that the error can name it.

struct KnownFormat {
    std::string_view start;
    const char *name, *hint;
};
constexpr char MEGATRON_HINT[] = "Megatron sets are not read yet; tokenize the text again with ./tokenize";
constexpr KnownFormat KNOWN_FORMATS[] = {
    {"MMIDIDX", "a Megatron index (.idx)", MEGATRON_HINT},
    {"TNTIDX", "an old Megatron index (.idx, TNTIDX)", MEGATRON_HINT},
    {"LITPKDS", "a lit-gpt packed shard", "tokenize the text again with ./tokenize"},
    {"BIN.TOK\n", "an llmq token file", "tokenize the text again with ./tokenize"},
    {"\x93NUMPY", "a NumPy array", "tokenize the text again with ./tokenize"},
    {"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull"},
    {"\x1f\x8b", "a gzip file", "unpack it; if it holds text, ./tokenize reads it as it is"},
    {"\x28\xb5\x2f\xfd", "a zstd file", "unpack it; if it holds text, ./tokenize reads it as it is"},
};
struct KnownMagic {
    int32_t magic;
    const char *name, *hint;
};
constexpr KnownMagic KNOWN_MAGICS[] = {
    {20240522, "an llm.c evaluation file", "evaluation files are not read yet; pass the token shards (PREFIX_000000.bin ...)"},
    {20240326, "an llm.c model checkpoint", "pass the token shards (PREFIX_000000.bin ...)"},
    {20240327, "an llm.c debug state", "pass the token shards (PREFIX_000000.bin ...)"},
    {20240328, "an llm.c tokenizer", "pass the token shards (PREFIX_000000.bin ...)"},
};

struct Guess {
    std::string name, hint;
};
inline Guess guess_format(std::string_view start) {
    if (start.empty()) { return {"empty (0 bytes)", "make it again"}; }
    for (const KnownFormat& f : KNOWN_FORMATS) {
        if (start.starts_with(f.start)) { return {f.name, f.hint}; }
    }
    int32_t magic = 0;
    if (start.size() >= sizeof magic) { memcpy(&magic, start.data(), sizeof magic); }
    for (const KnownMagic& m : KNOWN_MAGICS) {
        if (magic == m.magic) { return {m.name, m.hint}; }
    }
    bool text = true;
    for (const unsigned char c : start) { text = text && (c >= ' ' || c == '\n' || c == '\r' || c == '\t') && c != 0x7f; }
    if (text) { return {"a text file", "make shards of it: ./tokenize --tokenizer FILE --out PREFIX INPUT"}; }
    return {format("of an unknown kind (it starts with the int32 %d)", magic), "shards come from ./tokenize or from llm.c's data scripts"};
}

// ---------------------------------------------------------------------------------------------------------------
// Reading. One read is one pread, so that a file that is cut during the run is an error that names it; mapped, it would be a SIGBUS.

// So many shards of a process stay open; the others are opened for each read, so that thousands of them do not use up its descriptors.
inline i64 shards_to_keep_open() {
    constexpr i64 ENOUGH = 256;
    struct rlimit limit = {};
    check(getrlimit(RLIMIT_NOFILE, &limit) == 0, "cannot read the limit of open files: %s", strerror(errno));
    return std::min<rlim_t>(ENOUGH, limit.rlim_cur / 4);
}

class ShardReader {
public:
    explicit ShardReader(const std::string& path) : path_(path) {
        check(!is_directory(path), "shard '%s' is a folder\nHINT: write a pattern that matches its files: '%s/*.bin'", path.c_str(),
              path.c_str());
        check(!path_exists(path) || is_regular_file(path), "shard '%s' is a pipe or a device; wanted a file\nHINT: copy it to a file",
              path.c_str());
        std::unique_ptr<File> file = open_file();
        const i64 size = file->size();
        std::string start(std::min(size, FINGERPRINT_BYTES), '\0'), end = start;
        file->read_at(start.data(), start.size(), 0);
        file->read_at(end.data(), end.size(), size - (i64)end.size());
        fingerprint_ = XXH3_64bits_withSeed(end.data(), end.size(), XXH3_64bits(start.data(), start.size()));
        ShardHeader header = {};
        memcpy(&header, start.data(), std::min(start.size(), sizeof header));

        const ShardFormat* format = nullptr;
        for (const ShardFormat* f : {&SHARD_16_BIT, &SHARD_32_BIT}) {
            if (header.magic == f->magic) { format = f; }
        }
        if (format == nullptr) {
            const Guess guess = guess_format(start);
            die("'%s' is not a token shard: it is %s; wanted a file that starts with the magic number %d (16 bit ids) or %d (32 "
                "bit)\nHINT: %s",
                path.c_str(), guess.name.c_str(), SHARD_16_BIT.magic, SHARD_32_BIT.magic, guess.hint.c_str());
        }
        check(size >= SHARD_HEADER_BYTES, "shard '%s' is cut: found %lld bytes, wanted a header of %lld\nHINT: copy or make it again",
              path.c_str(), (long long)size, (long long)SHARD_HEADER_BYTES);
        check(
            header.version == format->version,
            "shard '%s': found version %d, wanted %d for magic number %d\nHINT: it comes from another release of its writer; make it again",
            path.c_str(), header.version, format->version, format->magic);
        check(header.tokens >= 0,
              "shard '%s': the header counts %d tokens, wanted 0 or more\nHINT: its writer passed 2^31 tokens; make smaller shards",
              path.c_str(), header.tokens);
        bytes_per_token_ = format->bytes_per_token;
        tokens_ = header.tokens;
        const i64 wanted = SHARD_HEADER_BYTES + tokens_ * bytes_per_token_;
        check(size == wanted,
              "shard '%s': found %lld bytes, wanted %lld for the %lld tokens of %d bytes that its header states\nHINT: the file is cut or "
              "still being written; copy or make it again",
              path.c_str(), (long long)size, (long long)wanted, (long long)tokens_, bytes_per_token_);
        if (readers_++ < shards_to_keep_open()) { file_ = std::move(file); }
    }
    ShardReader(const ShardReader&) = delete;
    ShardReader& operator=(const ShardReader&) = delete;
    ~ShardReader() { readers_--; }

    const std::string& path() const { return path_; }
    i64 tokens() const { return tokens_; }
    int bytes_per_token() const { return bytes_per_token_; }
    // Of the file's first and last 4 KiB: tells most sets of one shape apart, and thousands of shards are opened in no time.
    uint64_t fingerprint() const { return fingerprint_; }

    // ids [begin, begin + count) as int32; each must be in [0, vocab).
    void read(i64 begin, i64 count, i64 vocab, int32_t* out) const {
        check(begin >= 0 && count >= 0 && count <= tokens_ - begin, "'%s': tokens [%lld, %lld) are not among its %lld", path_.c_str(),
              (long long)begin, (long long)(begin + count), (long long)tokens_);
        thread_local std::vector<char> bytes;  // ranks that are threads read at the same time
        bytes.resize(count * bytes_per_token_);
        const i64 offset = SHARD_HEADER_BYTES + begin * bytes_per_token_;
        if (file_) {
            file_->read_at(bytes.data(), bytes.size(), offset);
        } else {
            open_file()->read_at(bytes.data(), bytes.size(), offset);
        }
        if (bytes_per_token_ == SHARD_16_BIT.bytes_per_token) {
            copy_ids((const uint16_t*)bytes.data(), begin, count, vocab, out);
        } else {
            copy_ids((const uint32_t*)bytes.data(), begin, count, vocab, out);
        }
    }

private:
    static constexpr i64 FINGERPRINT_BYTES = 4096;
    static_assert(FINGERPRINT_BYTES >= SHARD_HEADER_BYTES);
    static inline std::atomic<i64> readers_ = 0;  // of this process

    std::unique_ptr<File> open_file() const { return std::make_unique<File>(path_, "rbe"); }

    template <typename Id>
    void copy_ids(const Id* in, i64 begin, i64 count, i64 vocab, int32_t* out) const {
        Id largest = 0;  // one pass without branches; the culprit is looked for only when there is one
        for (i64 i = 0; i < count; i++) {
            out[i] = (int32_t)in[i];
            largest = std::max(largest, in[i]);
        }
        if ((i64)largest < vocab) { return; }
        i64 i = 0;
        while ((i64)in[i] < vocab) { i++; }
        die("'%s': token %lld has id %lld, outside the vocabulary of %lld\nHINT: the shards were made with another tokenizer, or --vocab "
            "is too small",
            path_.c_str(), (long long)(begin + i), (long long)in[i], (long long)vocab);
    }

    std::string path_;
    i64 tokens_ = 0;
    int bytes_per_token_ = 0;
    uint64_t fingerprint_ = 0;
    std::unique_ptr<File> file_;  // none: opened for each read
};

// ---------------------------------------------------------------------------------------------------------------
// Writing.

// The name of shard `index` of a set: PREFIX_000000.bin and so on.
inline std::string shard_path(const std::string& prefix, i64 index) { return format("%s_%06lld.bin", prefix.c_str(), (long long)index); }

struct ShardInfo {
    std::string file;  // without its folder, so that a set can be moved
    i64 tokens;
};

// Cuts a stream of ids into shards. They are written aside as PREFIX_000000.bin.tmp and appear under their names at publish(); without it
// nothing is left behind.
class ShardWriter {
public:
    ShardWriter(const std::string& prefix, i64 vocab, i64 shard_tokens)
        : prefix_(prefix), vocab_(vocab), shard_tokens_(shard_tokens), format_(shard_format(vocab)) {
        check(shard_tokens >= 1 && shard_tokens <= SHARD_MAX_TOKENS, "shards of %lld tokens: wanted 1 to %lld", (long long)shard_tokens,
              (long long)SHARD_MAX_TOKENS);
    }
    ShardWriter(const ShardWriter&) = delete;
    ShardWriter& operator=(const ShardWriter&) = delete;
    ~ShardWriter() {
        if (published_) { return; }
        for (size_t i = 0; i < shards_.size(); i++) { unlink(aside(i).c_str()); }
    }

    const std::vector<ShardInfo>& shards() const { return shards_; }

    void write(std::span<const int32_t> ids) {
        while (!ids.empty()) {
            if (file_ && shards_.back().tokens == shard_tokens_) { close_shard(); }
            if (!file_) { open_shard(); }
            const std::span<const int32_t> part = ids.first(std::min<size_t>(ids.size(), shard_tokens_ - shards_.back().tokens));
            if (format_.bytes_per_token == SHARD_16_BIT.bytes_per_token) {
                write_part<uint16_t>(part);
            } else {
                write_part<uint32_t>(part);
            }
            shards_.back().tokens += part.size();
            ids = ids.subspan(part.size());
        }
    }

    // Ends the last shard: everything is on the disk, still aside.
    void finish() {
        if (file_) { close_shard(); }
    }
    void publish() {
        finish();
        published_ = true;
        for (size_t i = 0; i < shards_.size(); i++) { rename_file(aside(i), shard_path(prefix_, i)); }
        sync_folder(parent_folder(prefix_));
    }

private:
    std::string aside(i64 index) const { return shard_path(prefix_, index) + ".tmp"; }

    ShardHeader header(i64 tokens) const { return {format_.magic, format_.version, narrow<int32_t>(tokens), {}}; }

    void open_shard() {
        const i64 index = shards_.size();
        shards_.push_back({base_name(shard_path(prefix_, index)), 0});
        file_ = std::make_unique<File>(aside(index), "wb");
        const ShardHeader h = header(0);  // its count is known only at the end
        file_->write(&h, sizeof h);
    }
    void close_shard() {
        check(fseeko(file_->handle(), 0, SEEK_SET) == 0, "cannot seek in '%s': %s", file_->path().c_str(), strerror(errno));
        const ShardHeader h = header(shards_.back().tokens);
        file_->write(&h, sizeof h);
        file_->sync_and_close();
        file_.reset();
    }
    template <typename Id>
    void write_part(std::span<const int32_t> ids) {
        std::vector<Id> narrowed(ids.size());
        for (size_t i = 0; i < ids.size(); i++) {
            check(ids[i] >= 0 && ids[i] < vocab_, "the tokenizer gave id %d, outside its vocabulary of %lld", ids[i], (long long)vocab_);
            narrowed[i] = (Id)ids[i];
        }
        file_->write(narrowed.data(), narrowed.size() * sizeof(Id));
    }

    std::string prefix_;
    i64 vocab_, shard_tokens_;
    ShardFormat format_;
    std::unique_ptr<File> file_;
    std::vector<ShardInfo> shards_;
    bool published_ = false;
};

// ---------------------------------------------------------------------------------------------------------------
// The side file PREFIX.json: what the shards themselves cannot say.

constexpr char TOKEN_SET_FORMAT[] = "token-set-1";

struct SplitInfo {
    i64 documents = 0, tokens = 0, text_bytes = 0;
    std::vector<ShardInfo> shards;
};
struct TokenSetInfo {
    std::string tokenizer_file, tokenizer_kind, tokenizer_hash;
    i64 vocab = 0;
    bool bos = false, eos = false;  // does each document start with BOS, end with EOS?
    int bos_id = -1, eos_id = -1;
    SplitInfo train, val;
    nlohmann::ordered_json problems = nlohmann::ordered_json::object();  // what tokenizing skipped or repaired: name -> count
};

inline nlohmann::ordered_json split_to_json(const SplitInfo& split) {
    nlohmann::ordered_json json = {{"documents", split.documents}, {"tokens", split.tokens}, {"text_bytes", split.text_bytes}};
    json["shards"] = nlohmann::ordered_json::array();
    for (const ShardInfo& s : split.shards) { json["shards"].push_back({{"file", s.file}, {"tokens", s.tokens}}); }
    return json;
}
inline SplitInfo split_from_json(const nlohmann::ordered_json& json) {
    SplitInfo split = {json.at("documents"), json.at("tokens"), json.at("text_bytes"), {}};
    for (const auto& s : json.at("shards")) { split.shards.push_back({s.at("file"), s.at("tokens")}); }
    return split;
}

inline void write_token_set_info(const std::string& path, const TokenSetInfo& info) {
    nlohmann::ordered_json json;
    json["format"] = TOKEN_SET_FORMAT;
    json["tokenizer"] = {{"file", info.tokenizer_file}, {"kind", info.tokenizer_kind}, {"xxh3", info.tokenizer_hash},
                         {"vocab", info.vocab},         {"bos_id", info.bos_id},       {"eos_id", info.eos_id}};
    json["documents"] = {{"start_with_bos", info.bos}, {"end_with_eos", info.eos}};
    json["bytes_per_token"] = shard_format(info.vocab).bytes_per_token;
    json["train"] = split_to_json(info.train);
    json["val"] = split_to_json(info.val);
    json["problems"] = info.problems;
    write_file_atomically(path, json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

// Nothing if there is no such file, or if it is somebody else's JSON.
inline std::optional<TokenSetInfo> read_token_set_info(const std::string& path) {
    if (!is_regular_file(path)) { return {}; }
    const auto json = nlohmann::ordered_json::parse(read_text_file(path), nullptr, false);
    if (!json.is_object() || json.value("format", nlohmann::ordered_json()) != TOKEN_SET_FORMAT) { return {}; }
    TokenSetInfo info;
    try {
        const auto &tokenizer = json.at("tokenizer"), &documents = json.at("documents");
        info.tokenizer_file = tokenizer.at("file");
        info.tokenizer_kind = tokenizer.at("kind");
        info.tokenizer_hash = tokenizer.at("xxh3");
        info.vocab = tokenizer.at("vocab");
        info.bos_id = tokenizer.at("bos_id");
        info.eos_id = tokenizer.at("eos_id");
        info.bos = documents.at("start_with_bos");
        info.eos = documents.at("end_with_eos");
        info.train = split_from_json(json.at("train"));
        info.val = split_from_json(json.at("val"));
        info.problems = json.at("problems");
    } catch (const nlohmann::json::exception& e) {
        die("'%s' is not what ./tokenize writes: %s\nHINT: tokenize again, or delete the file to train without it", path.c_str(), e.what());
    }
    return info;
}

// PREFIX of a shard PREFIX_000000.bin, "" if the name is of another kind.
inline std::string shard_prefix(const std::string& path) {
    const size_t underscore = path.rfind('_');
    if (underscore == std::string::npos || !path.ends_with(".bin")) { return ""; }
    const std::string number = path.substr(underscore + 1, path.size() - underscore - 5);
    return number.size() >= 6 && number.find_first_not_of("0123456789") == std::string::npos ? path.substr(0, underscore) : "";
}

constexpr char VAL_SUFFIX[] = "_val";  // validation shards of PREFIX are PREFIX_val_000000.bin ...

// The side file that belongs to a shard (of the set or of its validation part), and which of its splits lists that shard
// with that many tokens (another number: it is about an older shard of this name).
struct SideFile {
    std::string path;
    TokenSetInfo info;
    bool is_val;
    const SplitInfo& split() const { return is_val ? info.val : info.train; }
};
inline std::optional<SideFile> find_side_file(const std::string& shard, i64 tokens) {
    const std::string prefix = shard_prefix(shard);
    std::vector<std::string> candidates;
    if (!prefix.empty()) { candidates.push_back(prefix + ".json"); }
    if (prefix.ends_with(VAL_SUFFIX)) { candidates.push_back(prefix.substr(0, prefix.size() - strlen(VAL_SUFFIX)) + ".json"); }
    for (const std::string& path : candidates) {
        const std::optional<TokenSetInfo> info = read_token_set_info(path);
        if (!info) { continue; }
        for (const bool is_val : {false, true}) {
            for (const ShardInfo& s : (is_val ? info->val : info->train).shards) {
                if (s.file == base_name(shard) && s.tokens == tokens) { return SideFile{path, *info, is_val}; }
            }
        }
    }
    return {};
}

// Windows: unbuffered reads.
#if defined(_WIN32)

#include "device.h"

#include "status.h"

#include <cerrno>

#define NOMINMAX
#include <windows.h>

namespace ls {

namespace {

class WindowsDevice final : public Device {
public:
    WindowsDevice(const std::string & path, HANDLE handle, bool direct) : Device(path), handle_(handle), direct_(direct) {
        GetFileSizeEx(handle_, &opened_bytes_);
        GetFileTime(handle_, nullptr, nullptr, &opened_time_);
    }
    ~WindowsDevice() override { CloseHandle(handle_); }

    bool direct() const override { return direct_; }

    void check_unchanged() const override {
        LARGE_INTEGER n_bytes;
        FILETIME time;
        if (GetFileSizeEx(handle_, &n_bytes) && GetFileTime(handle_, nullptr, nullptr, &time) &&
            n_bytes.QuadPart == opened_bytes_.QuadPart && CompareFileTime(&time, &opened_time_) == 0) {
            return;
        }
        throw Error(LS_ERR_CHANGED, format("%s changed while it was in use; load the model again", path().c_str()))
            .path(path()).sizes(uint64_t(n_bytes.QuadPart), uint64_t(opened_bytes_.QuadPart));
    }

private:
    int64_t read_impl(uint64_t offset, uint8_t * dest, uint64_t n_bytes) override {
        OVERLAPPED at = {};
        at.Offset     = DWORD(offset);
        at.OffsetHigh = DWORD(offset >> 32);
        DWORD n = 0;
        if (ReadFile(handle_, dest, DWORD(n_bytes), &n, &at) || GetLastError() == ERROR_HANDLE_EOF) {
            return int64_t(n);
        }
        return -EIO;
    }

    HANDLE        handle_;
    bool          direct_;
    LARGE_INTEGER opened_bytes_ = {};
    FILETIME      opened_time_ = {};
};

HANDLE open_handle(const std::string & path, DWORD flags) {
    const int n = MultiByteToWideChar(CP_UTF8, 0, path.c_str(), -1, nullptr, 0);
    std::wstring wide(size_t(n), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, path.c_str(), -1, &wide[0], n);
    return CreateFileW(wide.c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING, flags, nullptr);
}

} // namespace

std::unique_ptr<Device> open_device(const std::string & path, bool want_direct, std::string & warning) {
    if (want_direct) {
        const HANDLE handle = open_handle(path, FILE_FLAG_NO_BUFFERING);
        if (handle != INVALID_HANDLE_VALUE) {
            return std::make_unique<WindowsDevice>(path, handle, true);
        }
        warning = format("%s: unbuffered reads are refused; reading through the system cache", path.c_str());
    }
    const HANDLE handle = open_handle(path, FILE_ATTRIBUTE_NORMAL);
    if (handle == INVALID_HANDLE_VALUE) {
        const bool missing = GetLastError() == ERROR_FILE_NOT_FOUND || GetLastError() == ERROR_PATH_NOT_FOUND;
        throw Error(missing ? LS_ERR_NOT_FOUND : LS_ERR_UNREADABLE, format("%s cannot be opened", path.c_str())).path(path);
    }
    return std::make_unique<WindowsDevice>(path, handle, false);
}

} // namespace ls

#endif

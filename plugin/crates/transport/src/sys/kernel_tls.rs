//! The kernel's TLS: it makes and opens the records of a socket, or has the network card do it
//! (Linux's `tls` documentation, `linux/tls.h`).

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use evenkeel_tls::{Cipher, TrafficKeys};
use socket2::Socket;

use super::socket::set_option_bytes;

const LAYER: &str = "tls";

/// The longest of `tls12_crypto_info_*`: version and cipher, IV, key, salt and sequence number.
const MAX_INFO: usize = 2 + 2 + 12 + 32 + 4 + 8;
/// The part of the IV that `linux/tls.h` calls salt, for ciphers that have it.
const SALT_BYTES: usize = 4;

/// Whose records the kernel is to make or open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelTls {
    /// This side's.
    Send,
    /// The peer's.
    Receive,
}

/// Whether the kernel has TLS 1.3 in both directions. It has none until its module is loaded, and
/// the file that lists what is loaded is missing in containers, so a connection over the loopback
/// interface shows it.
pub(crate) fn has_kernel_tls() -> bool {
    probe().is_ok()
}

fn probe() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let socket = Socket::from(TcpStream::connect(listener.local_addr()?)?);
    allow_kernel_tls(&socket)?;
    let (info, length) = crypto_info(Cipher::Aes128Gcm, &[0; 16], &[0; 12], 0)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    for direction in [KernelTls::Send, KernelTls::Receive] {
        set_info(&socket, direction, &info[..length])?;
    }
    Ok(())
}

/// Makes a connected socket one that the kernel's TLS may work on. Nothing changes until it has
/// keys.
///
/// # Errors
/// When the kernel has no TLS, or the socket is not connected.
pub(crate) fn allow_kernel_tls(socket: &Socket) -> io::Result<()> {
    set_option_bytes(socket, libc::IPPROTO_TCP, libc::TCP_ULP, LAYER.as_bytes())
}

/// From here on, the kernel makes or opens the records of one direction.
///
/// # Errors
/// When the kernel lacks TLS 1.3 or the cipher. The direction is as it was then.
pub(crate) fn set_kernel_keys(
    socket: &Socket,
    direction: KernelTls,
    keys: &TrafficKeys,
) -> io::Result<()> {
    let (key, iv) = keys.key_and_iv();
    let (info, length) = crypto_info(keys.cipher(), key, iv, keys.sequence())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    set_info(socket, direction, &info[..length])
}

fn set_info(socket: &Socket, direction: KernelTls, info: &[u8]) -> io::Result<()> {
    let option = match direction {
        KernelTls::Send => libc::TLS_TX,
        KernelTls::Receive => libc::TLS_RX,
    };
    set_option_bytes(socket, libc::SOL_TLS, option, info)
}

/// `tls12_crypto_info_aes_gcm_128` and its siblings, and its length.
fn crypto_info(
    cipher: Cipher,
    key: &[u8],
    iv: &[u8],
    sequence: u64,
) -> Option<([u8; MAX_INFO], usize)> {
    let (cipher, key_bytes, salt_bytes) = match cipher {
        Cipher::Aes128Gcm => (libc::TLS_CIPHER_AES_GCM_128, 16, SALT_BYTES),
        Cipher::Aes256Gcm => (libc::TLS_CIPHER_AES_GCM_256, 32, SALT_BYTES),
        Cipher::ChaCha20Poly1305 => (libc::TLS_CIPHER_CHACHA20_POLY1305, 32, 0),
    };
    let (salt, iv) = iv.split_at_checked(salt_bytes)?;
    if key.len() != key_bytes {
        return None;
    }
    let mut info = [0; MAX_INFO];
    let mut length = 0;
    for part in [
        &libc::TLS_1_3_VERSION.to_ne_bytes()[..],
        &cipher.to_ne_bytes(),
        iv,
        key,
        salt,
        &sequence.to_be_bytes(),
    ] {
        info.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    Some((info, length))
}

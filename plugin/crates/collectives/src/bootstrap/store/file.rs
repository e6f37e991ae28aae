//! A store in a folder that all ranks can access.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::memory::add_to;
use super::{MAX_VALUE, Store, check};
use crate::codec::digest;
use crate::error::{Error, Result};

/// A store in a folder, with a file for each value. Values appear atomically. The folder is created if it is missing and is never
/// removed: use another one for each job.
#[derive(Clone, Debug)]
pub struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// Opens the store in this folder.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when the folder cannot be created.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref().to_path_buf();
        fs::create_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
        Ok(Self { folder })
    }

    /// The file for a name. Letters and digits stay as they are. A long name is shortened and gets a digest.
    fn path(&self, name: &str) -> PathBuf {
        let mut file = String::from("v-");
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || byte == b'-' {
                file.push(char::from(byte));
            } else {
                file.push_str(&format!("_{byte:02x}"));
            }
        }
        if file.len() > 200 {
            file.truncate(160);
            // 128 bits, so that no two names of a job are the same by chance.
            let (first, second) = name.as_bytes().split_at(name.len() / 2);
            file.push_str(&format!("_{:016x}{:016x}", digest(first), digest(second)));
        }
        self.folder.join(file)
    }

    /// Locks the store until the file is dropped, or this process is killed.
    fn lock(&self) -> Result<File> {
        let guard = self.folder.join("lock");
        let guard = OpenOptions::new().create(true).truncate(false).write(true).open(guard);
        let guard = guard.map_err(|error| failed(&self.folder, &error))?;
        flock(&guard, FlockOperation::LockExclusive)
            .map_err(|error| failed(&self.folder, &error.into()))?;
        Ok(guard)
    }

    fn write(&self, path: &Path, value: &[u8]) -> Result<()> {
        let unique =
            evenkeel_transport::random().map_err(|error| Error::system("random", error))?;
        let unique = u64::from_le_bytes(unique);
        let fresh = self.folder.join(format!("t-{unique:016x}"));
        let written = File::create_new(&fresh)
            .and_then(|mut file| file.write_all(value))
            .and_then(|()| fs::rename(&fresh, path));
        written.map_err(|error| {
            // An incomplete value must not stay.
            let _ = fs::remove_file(&fresh);
            failed(path, &error)
        })
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::of_store(format!("store in {}: {error}", path.display()))
}

impl Store for FileStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        check(name, value)?;
        self.write(&self.path(name), value)
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name);
        let mut value = vec![];
        match File::open(&path)
            .and_then(|file| file.take(MAX_VALUE as u64 + 1).read_to_end(&mut value))
        {
            Ok(_) if value.len() > MAX_VALUE => {
                Err(Error::of_store(format!("{} is larger than any value", path.display())))
            }
            Ok(_) => Ok(Some(value)),
            Err(error) if error.kind() == IoErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        check(name, &[])?;
        let _guard = self.lock()?;
        let sum = add_to(self.get(name)?.as_deref(), name, amount)?;
        self.write(&self.path(name), &sum.to_le_bytes())?;
        Ok(sum)
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        check(name, value)?;
        let _guard = self.lock()?;
        if let Some(decided) = self.get(name)? {
            return Ok(decided);
        }
        self.write(&self.path(name), value)?;
        Ok(value.to_owned())
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != IoErrorKind::NotFound => Err(failed(&path, &error)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_store_contract;
    use super::*;
    use crate::test_support::Folder;
    use std::sync::Arc;

    #[test]
    fn file_store_fulfils_the_contract() {
        let folder = Folder::new();
        check_store_contract(
            &(Arc::new(FileStore::open(folder.path()).unwrap()) as Arc<dyn Store>),
        );
    }

    #[test]
    fn file_store_tells_long_names_apart() {
        let folder = Folder::new();
        let store = FileStore::open(folder.path()).unwrap();
        let long = "/".repeat(500);
        store.set(&format!("{long}a"), b"1").unwrap();
        assert_eq!(store.get(&format!("{long}b")).unwrap(), None);
        assert_eq!(store.get(&format!("{long}a")).unwrap().as_deref(), Some(&b"1"[..]));
    }

    #[test]
    fn file_store_error_names_the_folder() {
        let error = FileStore::open("/proc/nothing/here").unwrap_err().to_string();
        assert!(error.contains("/proc/nothing/here"), "{error}");
    }
}

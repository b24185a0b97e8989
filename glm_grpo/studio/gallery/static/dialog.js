/* What stands before the page until it is left, and its list of keys. */
(function () {
  "use strict";

  const { html, parts } = window.glmGallery;
  const { useEffect, useRef } = preactHooks;

  /**
   * What stands before the page until it is left by Escape or its button; what had the focus
   * before has it again.
   *
   * @param title Heading; announced when it changes.
   * @param tools Between the heading and the buttons.
   * @param buttons Beside the button that closes.
   * @param focus What has the focus first, as a ref; the button that closes without.
   * @param onClose Called when it was left.
   */
  function Dialog({ title, className, tools, buttons, focus, onClose, children }) {
    const dialog = useRef(null);
    const close = useRef(null);
    const isShown = useRef(true);
    useEffect(() => {
      dialog.current.showModal();
      /* By hand: of an element that enters the page later the browser ignores `autofocus`, and says
         so in the console. */
      (focus ?? close).current.focus();
      return () => {
        isShown.current = false;
        dialog.current.close();
      };
    }, []);
    /* The browser closes a dialog by itself on Escape, and gives the focus back; the state
       follows. */
    return html`<dialog ref=${dialog} class=${className} aria-labelledby="dialog-title"
        onClose=${() => isShown.current && onClose()}>
      <div class="dialog-head">
        <h2 id="dialog-title" aria-live="polite">${title}</h2>
        ${tools}
        <div class="buttons">
          ${buttons}
          <button type="button" ref=${close} onClick=${onClose}>Close</button>
        </div>
      </div>
      ${children}
    </dialog>`;
  }

  /** @param keys [[key, what it does]]. */
  function KeyTable({ keys }) {
    return html`<table>
      <thead><tr><th scope="col">Key</th><th scope="col">Effect</th></tr></thead>
      <tbody>
        ${keys.map(
          ([key, effect]) => html`<tr key=${key}>
            <th scope="row"><kbd>${key}</kbd></th>
            <td>${effect}</td>
          </tr>`,
        )}
      </tbody>
    </table>`;
  }

  Object.assign(parts, { Dialog, KeyTable });
})();
